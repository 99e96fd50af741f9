/* finding.h - what `check` found: one entry per cause, whatever the number of tensors it touches.
 *
 * A rule has a stable id ("C-..."), a severity and a remedy; docs/CHECKS.md explains each (lint compares the ids). Objects of
 * one rule and cause are collected and shown as patterns: "layers.{0-39}.mlp.experts.{3,7}.gate_proj". */
#ifndef NIBBLE_FINDING_H
#define NIBBLE_FINDING_H

#include "base/buf.h"
#include "base/str.h"

typedef enum severity { SEV_NOTE, SEV_WARNING, SEV_ERROR } severity;
extern const char *const severity_names[]; /* "note", "warning", "error" */

typedef struct finding {
    const char *rule; /* "C-SCALE-NAN" */
    severity severity;
    const char *remedy;
    char *message; /* of the first object */
    char *cause;   /* NULL: the rule has one */
    str *objects;  /* [count], owned copies */
    int count, cap;
} finding;

typedef struct findings {
    finding *v; /* [n] in order of appearance */
    int n, cap;
} findings;

/* Add `object` to the entry of `rule` and `cause` (NULL: the rule has one), which is made with the message when it
 * is the first. The rule must be in the table of finding.c. */
void finding_add(findings *f, const char *rule, const char *cause, str object, const char *fmt, ...) PRINTF_LIKE(5, 6);
/* The same with another severity than the rule's. */
void finding_add_as(findings *f, severity s, const char *rule, const char *cause, str object, const char *fmt, ...)
    PRINTF_LIKE(6, 7);
/* Replace the remedy of the entry that was added last; `remedy` is a literal. */
void finding_set_remedy(findings *f, const char *remedy);
/* Entries of a severity. */
int findings_of(const findings *f, severity s);
bool findings_has(const findings *f, const char *rule);
/* Most severe first, otherwise as they came. */
void findings_sort(findings *f);
/* The objects as patterns, at most `most` of them. */
void finding_objects(buf *out, const finding *x, int most);
void findings_free(findings *f);

/* The rules, for tests and documentation; NULL behind the last. */
const char *finding_rule(int i);

#endif
