/* scratch.h - a temporary folder for one test. Everything a test writes lies below it. */
#ifndef NIBBLE_TEST_SCRATCH_H
#define NIBBLE_TEST_SCRATCH_H

#include <stddef.h>

char *scratch_new(void);      /* a fresh folder (mkdtemp); aborts on failure */
void scratch_free(char *dir); /* removes the folder with its content, frees the name */
char *scratch_path(const char *dir, const char *name);
/* Write a file; the caller frees the returned path. */
char *scratch_put(const char *dir, const char *name, const void *p, size_t n);
char *scratch_puts(const char *dir, const char *name, const char *text);

#endif
