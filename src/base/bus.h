/* bus.h - what happens when a mapped file is cut short, or its disk fails, while the mapping is read: the kernel sends
 * SIGBUS. There is no way back into the computation, but a way to say which file it was. */
#ifndef NIBBLE_BUS_H
#define NIBBLE_BUS_H

#include "base/base.h"

/* From now on such a fault prints `nibble: E-FILE-LOST: path: ...` on standard error and ends the process with the exit
 * status of ERR_MACHINE, from whichever thread it strikes; outputs stay as a kill would leave them. Any other SIGBUS keeps
 * its default effect. For main. */
void bus_catch(void);

/* Remember, and forget, a mapping for the message. Thread-safe. Beyond 1024 mappings at a time the file goes unnamed. */
void bus_watch(const void *p, size_t bytes, const char *path);
void bus_forget(const void *p);

#endif
