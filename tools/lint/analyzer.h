/* analyzer.h - included before every file that clang-tidy reads: the analyzer sees one file at a time and would otherwise
 * follow paths on which a function that failed goes on as if it had not. */
#include "base/err.h"
#define fail(...) (fail(__VA_ARGS__), false)
#define fail_prefix(...) (fail_prefix(__VA_ARGS__), false)
