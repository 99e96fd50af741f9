#include "ops/ops.h"

#include <string.h>

#include "ops/ops_impl.h"

bool ops_open(ops **out, const ops_options *opt, err *e) {
    *out = NULL;
    const char *device = opt->device ? opt->device : "cpu";
    if (!layer_set_empty(&opt->cpu_experts) && strcmp(device, "cuda") != 0)
        return fail(
            e, ERR_USAGE, "E-OPS-EXPERTS",
            "--experts cpu: the experts of --device %.40s are there already (leave it out, or add --device cuda)",
            device);
    if (strcmp(device, "cpu") == 0) return ops_cpu_open(out, opt->threads, opt->isa, e);
    if (strcmp(device, "ref") == 0) return ops_ref_open(out, e);
    if (strcmp(device, "cuda") == 0) return ops_cuda_open(out, opt->threads, opt->isa, e);
    return fail(e, ERR_USAGE, "E-OPS-DEVICE", "device '%.40s': unknown (cpu, cuda or ref)", device);
}

const char *linear_name(const linear *w) { return w->name; }
bool linear_owns_data(const linear *w) { return w->packed != NULL; }
int linear_rows(const linear *w) { return w->rows; }
int linear_cols(const linear *w) { return w->cols; }
const char *experts_name(const experts *x) { return x->name; }
int experts_count(const experts *x) { return x->count; }
int experts_inter(const experts *x) { return x->inter; }
int experts_hidden(const experts *x) { return x->hidden; }
