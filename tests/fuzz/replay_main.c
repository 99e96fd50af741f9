/* replay_main.c - runs a fuzz target over stored inputs without libFuzzer: files, or folders of files.
 *
 * The target itself has nothing to report: a crash, a failed CHECK or a sanitizer report ends the program. Every input
 * is also run with its last byte cut off and once empty, each in a heap block of its exact size, so that ASan sees a
 * read past the end. */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int LLVMFuzzerTestOneInput(const uint8_t *p, size_t n);

static int inputs;

static void run_bytes(const uint8_t *p, size_t n) {
    uint8_t *copy = malloc(n ? n : 1);
    if (!copy) abort();
    if (n) memcpy(copy, p, n);
    LLVMFuzzerTestOneInput(copy, n);
    free(copy);
}

static int run_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) return perror(path), 1;
    uint8_t *p = NULL;
    size_t n = 0, cap = 0, got;
    do {
        cap = cap ? 2 * cap : 4096;
        p = realloc(p, cap);
        if (!p) abort();
        got = fread(p + n, 1, cap - n, f);
        n += got;
    } while (n == cap);
    fclose(f);
    run_bytes(p, n);
    if (n) run_bytes(p, n - 1);
    free(p);
    inputs++;
    return 0;
}

static int skip_hidden(const struct dirent *d) { return d->d_name[0] != '.'; }

static int run_path(const char *path) {
    struct stat st;
    if (stat(path, &st)) return perror(path), 1;
    if (!S_ISDIR(st.st_mode)) return run_file(path);
    struct dirent **list;
    const int count = scandir(path, &list, skip_hidden, alphasort);
    if (count < 0) return perror(path), 1;
    int bad = 0;
    for (int i = 0; i < count; i++) {
        char *file = malloc(strlen(path) + strlen(list[i]->d_name) + 2);
        if (!file) abort();
        sprintf(file, "%s/%s", path, list[i]->d_name);
        bad |= run_file(file);
        free(file);
        free(list[i]);
    }
    free(list);
    return bad;
}

int main(int argc, char **argv) {
    const char *name = strrchr(argv[0], '/');
    name = name ? name + 1 : argv[0];
    printf("[==========] Running 1 test(s).\n[ RUN      ] %s\n", name);
    fflush(stdout);
    int bad = argc < 2;
    run_bytes((const uint8_t *)"", 0);
    for (int i = 1; i < argc; i++) bad |= run_path(argv[i]);
    bad |= inputs == 0;
    printf("%s %s (%d inputs)\n[==========] 1 test(s) run.\n", bad ? "[  FAILED  ]" : "[       OK ]", name, inputs);
    return bad;
}
