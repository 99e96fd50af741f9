#include "lib/scratch.h"

#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"

char *scratch_new(void) {
    const char *base = getenv("TMPDIR");
    char *dir = path_join(base && *base ? base : "/tmp", "nibble-test-XXXXXX");
    if (!mkdtemp(dir)) {
        perror(dir);
        abort();
    }
    return dir;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *where) {
    (void)st, (void)kind, (void)where;
    return remove(path);
}

void scratch_free(char *dir) {
    nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(dir);
}

char *scratch_path(const char *dir, const char *name) { return path_join(dir, name); }

char *scratch_put(const char *dir, const char *name, const void *p, size_t n) {
    char *path = path_join(dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(p, 1, n, f) != n || fclose(f)) {
        perror(path);
        abort();
    }
    return path;
}

char *scratch_puts(const char *dir, const char *name, const char *text) {
    return scratch_put(dir, name, text, strlen(text));
}
