/* prefix_disk.h - the folder of a prefix cache: files are written by a thread of its own, so that no step waits for a disk.
 *
 * A file's name is the identity and the sum of its tokens. Several models may share a folder, since only files whose names
 * begin with the identity are looked at. Of these, what is damaged, cut off or not of this identity is said (W-PREFIX-FILE)
 * and removed. A disk that fails is said once (W-PREFIX-DISK) and costs recomputing, nothing else. Owner thread only. */
#ifndef NIBBLE_PREFIX_DISK_H
#define NIBBLE_PREFIX_DISK_H

#include "base/err.h"
#include "base/file.h"
#include "engine/prefix_file.h"

typedef struct prefix_disk prefix_disk;

/* Error: E-PREFIX-DIR (cannot be made or read), E-MACHINE-THREADS. */
NODISCARD bool prefix_disk_open(prefix_disk **out, const char *dir, uint64_t identity, err *e);
/* Waits for what is being written. */
void prefix_disk_close(prefix_disk *d);
/* Every file with a sound head: its tokens, which live during the call, and its size, oldest first. */
void prefix_disk_scan(prefix_disk *d, void (*found)(void *ctx, const int32_t *tokens, int n, size_t bytes), void *ctx);
/* Write an entry, after the one that is being written: takes over `payload` (malloc'ed). */
void prefix_disk_write(prefix_disk *d, const int32_t *tokens, int n, void *payload, size_t bytes);
/* Is one being written? */
bool prefix_disk_busy(prefix_disk *d);
/* Map the entry of these tokens; a payload of another size than `bytes` or a bad sum is damage. False: it is gone. */
bool prefix_disk_read(prefix_disk *d, mapping *map, const uint8_t **payload, const int32_t *tokens, int n,
                      size_t bytes);
void prefix_disk_remove(prefix_disk *d, const int32_t *tokens, int n);

#endif
