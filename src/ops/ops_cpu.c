#include "ops/ops_impl.h"

bool ops_cpu_open(ops **out, int threads, kern_isa isa, err *e) {
    (void)threads, (void)isa;
    return ops_ref_open(out, e); /* until the threaded backend is here */
}
