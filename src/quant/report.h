/* report.h - what an export did: the table of formats before, the summary of errors after. */
#ifndef NIBBLE_REPORT_H
#define NIBBLE_REPORT_H

#include "quant/configs.h"
#include "quant/quantize.h"

/* Formats, sizes and the decode bound of a plan (bytes read per token at batch 1; tokens/s at the given read bandwidths). */
void report_plan(buf *out, const plan *p, bool as_json);

/* Per module class: count, bytes before and after, relative error (RMS) and what algorithm max would give, saturated,
 * floored and clipped blocks, ratio of the group's amax to the module's own; time and rate unless r->seconds is 0 (an
 * export holds nothing that differs from run to run). Table or JSON object ("nibble.quantize/1"). */
void report_result(buf *out, const plan *p, const quantize_result *r, const provenance *from, bool as_json);

/* Only its rows: lines of the table with a heading, or the JSON member "classes". */
void report_classes(buf *out, const plan *p, const quantize_result *r, bool as_json);

/* Markdown for a model card: format, recipe, calibration, measured error. */
void report_card(buf *out, const plan *p, const quantize_result *r, const provenance *from);

#endif
