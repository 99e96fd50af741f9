#include "base/bus.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/err.h"

enum { WATCHED_MAX = 1024, NAME_MAX_BYTES = 256 };

/* `end` is 0 while the entry is free or being changed: the handler, which cannot wait, then passes over it. */
typedef struct watched {
    _Atomic uintptr_t begin, end;
    char name[NAME_MAX_BYTES];
} watched;

static watched table[WATCHED_MAX];
static pthread_mutex_t changing = PTHREAD_MUTEX_INITIALIZER;

void bus_watch(const void *p, size_t bytes, const char *path) {
    const size_t n = strlen(path), skip = n < NAME_MAX_BYTES ? 0 : n - (NAME_MAX_BYTES - 1); /* the end says more */
    pthread_mutex_lock(&changing);
    for (int i = 0; i < WATCHED_MAX; i++) {
        watched *w = &table[i];
        if (w->end) continue;
        for (size_t k = skip; k <= n; k++) {
            const unsigned char c = (unsigned char)path[k];
            w->name[k - skip] = (char)(c && (c < 0x20 || c == 0x7f) ? '?' : c);
        }
        w->begin = (uintptr_t)p;
        w->end = (uintptr_t)p + bytes;
        break;
    }
    pthread_mutex_unlock(&changing);
}

void bus_forget(const void *p) {
    pthread_mutex_lock(&changing);
    for (int i = 0; i < WATCHED_MAX; i++)
        if (table[i].end && table[i].begin == (uintptr_t)p) {
            table[i].end = 0;
            break;
        }
    pthread_mutex_unlock(&changing);
}

static const char *name_of(uintptr_t at) {
    for (int i = 0; i < WATCHED_MAX; i++) {
        const uintptr_t end = table[i].end;
        if (at >= table[i].begin && at < end) return table[i].name;
    }
    return "a mapped file";
}

/* Only what POSIX allows in a handler. */
static void on_bus(int signal, siginfo_t *info, void *context) {
    static const char what[] =
        ": became shorter while in use or cannot be read any more (do not write to a model in use; check "
        "the disk)\n";
    static atomic_flag said = ATOMIC_FLAG_INIT;
    (void)context;
    if (info->si_code !=
        BUS_ADRERR) { /* sent by someone, or a fault of the program's own: as if there were no handler */
        sigaction(signal, &(struct sigaction){ .sa_handler = SIG_DFL }, NULL);
        raise(signal);
        return;
    }
    if (atomic_flag_test_and_set(&said))
        for (;;) pause(); /* another thread is about to end the process */
    char line[32 + NAME_MAX_BYTES + sizeof what];
    const char *const parts[] = { "nibble: ", "E-FILE-LOST", ": ", name_of((uintptr_t)info->si_addr), what };
    size_t n = 0;
    for (size_t i = 0; i < ARRAY_LEN(parts); i++)
        for (const char *p = parts[i]; *p; p++) line[n++] = *p;
    (void)!write(STDERR_FILENO, line, n);
    _exit(err_exit_code(ERR_MACHINE));
}

void bus_catch(void) {
    struct sigaction sa = { .sa_sigaction = on_bus, .sa_flags = SA_SIGINFO };
    sigemptyset(&sa.sa_mask);
    sigaction(SIGBUS, &sa, NULL);
}
