/* The undecided tail of the generation lies in one buffer; every step either consumes from its front or waits for
 * more. Steps look only at the buffer and at remembered state, never at where a chunk ended, so chunking cannot
 * matter. Inside a call, scanning resumes where it stopped, so long values cost linear time. */
#include "text/split.h"

#include <stdlib.h>

#include "text/split_args.h"
#include "text/utf8_feed.h"

typedef enum mode { M_THINK, M_ANSWER } mode;

struct split {
    split_event *fn;
    void *ctx;
    const json *tools;
    buf b; /* valid UTF-8 that no event carries yet */
    utf8_feed utf8;
    mode mode;
    bool calls_first;
    bool begun;       /* M_ANSWER: its first word was seen; M_THINK: its first character */
    bool after_think; /* leading white space of the answer is nobody's */
    bool shown_text;  /* some TEXT event was sent */
    bool after_call;  /* a call ended and only white space or closing tags followed */
    bool line_start;  /* M_ANSWER: only blanks since the last newline */
    char fence;       /* '`' or '~' inside a code fence */
    size_t fence_n;
    size_t lead;      /* white space known to stand at the front of the buffer */
    call_parser call; /* call.active: the buffer starts with (M_ANSWER) or holds (M_THINK) a possible call */
    bool told;        /* the call's CALL event was sent */
    call_args args;
    size_t call_from; /* M_ANSWER: white space before the possible call, text if it is none */
    buf done;         /* M_THINK: finished calls that wait for the end, as CALL events: name NUL args NUL */
};

static void emit(split *s, split_kind kind, size_t n) {
    if (!n) return;
    if (kind == SPLIT_TEXT) s->shown_text = true;
    s->fn(s->ctx, kind, (str){ s->b.p, n });
}

static void consume(split *s, size_t n) {
    if (!n) return;
    memmove(s->b.p, s->b.p + n, s->b.n - n);
    s->b.n -= n;
    s->lead = 0;
}

static bool blank(char c) { return c == ' ' || c == '\t' || c == '\n' || c == '\r'; }

static size_t blanks(split *s, size_t at) {
    const bool front = at == 0;
    if (front) at = s->lead;
    while (at < s->b.n && blank(s->b.p[at])) at++;
    if (front) s->lead = at;
    return at;
}

/* ---- thinking ---- */

static void leave_thought(split *s, size_t n) {
    consume(s, n);
    s->mode = M_ANSWER;
    s->begun = false;
    s->after_think = true;
    s->line_start = true;
}

/* The thought so far held no call after all. */
static void no_call_in_thought(split *s, size_t upto) {
    emit(s, SPLIT_THOUGHT, upto);
    consume(s, upto);
    s->call.active = false;
    buf_clear(&s->done);
}

/* Behind a finished call in the thought: closing tags and white space, another call, or anything else. */
static bool step_after_thought_call(split *s, bool final) {
    const size_t at = blanks(s, s->call.at);
    size_t n;
    const tag_match m = call_closer(&s->b, at, &n);
    if (m == TAG_WHOLE) {
        s->call.at = at + n;
        return true;
    }
    size_t open;
    const tag_match o = call_opener(&s->b, at, at == s->call.at ? false : s->b.p[at - 1] == '\n', s->tools, &open);
    if (o == TAG_WHOLE) {
        call_begin(&s->call, at, open);
        return true;
    }
    if (at == s->b.n || m == TAG_PART || o == TAG_PART) {
        if (!final) return false;
        /* the generation ends right after a complete call: it counts */
        for (size_t i = 0; i < s->done.n;) {
            const str name = str_of(s->done.p + i), args = str_of(s->done.p + i + name.n + 1);
            s->fn(s->ctx, SPLIT_CALL, name);
            s->fn(s->ctx, SPLIT_ARGS, args);
            s->fn(s->ctx, SPLIT_CALL_END, STR(""));
            i += name.n + args.n + 2;
        }
        consume(s, s->b.n);
        s->call.active = false;
        return true;
    }
    no_call_in_thought(s, at);
    return true;
}

static bool step_thought_call(split *s, bool final) {
    if (s->call.state == CALL_DONE) return step_after_thought_call(s, final);
    switch (call_step(&s->call, &s->b, s->tools, true, final)) {
    case CALL_WAIT:
        if (!final) return false;
        no_call_in_thought(s, s->b.n);
        return true;
    case CALL_REJECT: no_call_in_thought(s, s->call.at); return true;
    case CALL_COMPLETE: {
        const str name = call_name(&s->call, &s->b);
        buf_str(&s->done, name);
        buf_byte(&s->done, 0);
        args_begin(&s->args, &s->done, s->tools, name);
        args_end(&s->args, &s->done, &s->call, &s->b);
        buf_byte(&s->done, 0);
        return true;
    }
    }
    return false;
}

/* At '<' in the thought: a tag, a part of one, or text. Sets *skip to the bytes that are text. */
static tag_match thought_tag(split *s, size_t at, size_t *n) {
    const tag_match close = tag_at(&s->b, at, "</think>", n);
    if (close != TAG_NONE || !s->tools) return close;
    const bool line = at == 0 ? s->line_start : s->b.p[at - 1] == '\n';
    return call_opener(&s->b, at, line, s->tools, n);
}

static bool step_thought(split *s, bool final) {
    if (s->call.active) return step_thought_call(s, final);
    if (!s->begun) { /* a <think> that repeats the prompt's goes */
        const size_t at = blanks(s, 0);
        size_t n;
        const tag_match m = tag_at(&s->b, at, "<think>", &n);
        if ((m == TAG_PART || at == s->b.n) && !final) return false;
        s->begun = true;
        if (m == TAG_PART) {
            consume(s, s->b.n);
            return false;
        }
        if (m == TAG_WHOLE) {
            consume(s, at + n);
            return true;
        }
    }
    size_t at = 0;
    while (at < s->b.n) {
        const char *lt = memchr(s->b.p + at, '<', s->b.n - at);
        if (!lt) {
            at = s->b.n;
            break;
        }
        at = (size_t)(lt - s->b.p);
        size_t n;
        const tag_match m = thought_tag(s, at, &n);
        if (m == TAG_NONE) {
            at++;
            continue;
        }
        emit(s, SPLIT_THOUGHT, at);
        if (at) s->line_start = s->b.p[at - 1] == '\n';
        consume(s, at);
        if (m == TAG_PART) {
            if (final) consume(s, s->b.n); /* an unfinished tag */
            return final;
        }
        if (s->b.p[1] == '/') {
            leave_thought(s, n);
        } else {
            call_begin(&s->call, 0, n);
        }
        return true;
    }
    emit(s, SPLIT_THOUGHT, at);
    if (at) s->line_start = s->b.p[at - 1] == '\n';
    consume(s, at);
    return false;
}

/* ---- the answer ---- */

/* Before the first word: white space, and tags of thinking that belong to no text. */
static bool step_answer_start(split *s, bool final) {
    const size_t at = blanks(s, 0);
    size_t n, k;
    const tag_match open = tag_at(&s->b, at, "<think>", &n), close = tag_at(&s->b, at, "</think>", &k);
    if (at == s->b.n || open == TAG_PART || close == TAG_PART) {
        if (!final) return false;
        if (at == s->b.n ? !s->after_think : s->b.n - at == 1 && !s->tools) emit(s, SPLIT_TEXT, s->b.n);
        consume(s, s->b.n);
        return false;
    }
    if (open == TAG_WHOLE && !s->after_think) {
        consume(s, at + n);
        s->mode = M_THINK;
        s->begun = true;
        s->line_start = true;
        return true;
    }
    if (close == TAG_WHOLE) {
        leave_thought(s, at + k);
        return true;
    }
    if (s->calls_first && s->b.p[at] != '<') s->tools = NULL;
    if (s->after_think) consume(s, at);
    s->begun = true;
    s->line_start = true;
    return true;
}

enum { FENCE_LINE_MAX = 1024 };

/* A line that may open or close a code fence: three or more marks, nothing but white space behind a closing one, no
 * backtick behind an opening one of backticks. False: the line's end is needed first. *n = bytes to pass as text. */
static bool fence_line(split *s, size_t at, bool final, size_t *n) {
    const char c = s->b.p[at];
    const size_t left = s->b.n - at, look = left < FENCE_LINE_MAX ? left : FENCE_LINE_MAX;
    const char *nl = memchr(s->b.p + at, '\n', look);
    const size_t line = nl ? (size_t)(nl - s->b.p) - at : look;
    size_t marks = 0, end;
    while (marks < line && s->b.p[at + marks] == c) marks++;
    if (!nl && left < FENCE_LINE_MAX && !final && (marks >= 3 || marks == left)) return false;
    *n = marks;
    if (marks < 3) return true;
    for (end = marks; end < line && blank(s->b.p[at + end]);) end++;
    const bool bare = end == line && line < FENCE_LINE_MAX;
    if (!s->fence) {
        if (c == '`' && memchr(s->b.p + at + marks, c, line - marks)) return true;
        s->fence = c;
        s->fence_n = marks;
    } else if (s->fence == c && marks >= s->fence_n && bare) {
        s->fence = 0;
    }
    return true;
}

/* Tell what is certain of the call; ended: all that there is. */
static void tell_call(split *s, bool ended) {
    if (!s->told && !args_may_begin(&s->call)) return;
    buf out = { 0 };
    if (!s->told) {
        const str name = call_name(&s->call, &s->b);
        s->fn(s->ctx, SPLIT_CALL, name);
        args_begin(&s->args, &out, s->tools, name);
        s->told = true;
    }
    if (ended)
        args_end(&s->args, &out, &s->call, &s->b);
    else
        args_step(&s->args, &out, &s->call, &s->b);
    if (out.n) s->fn(s->ctx, SPLIT_ARGS, buf_view(&out));
    buf_free(&out);
}

static void end_call(split *s, split_kind how, size_t used) {
    tell_call(s, true);
    s->fn(s->ctx, how, STR(""));
    consume(s, used);
    s->call.active = s->told = false;
    s->after_call = true;
    s->line_start = false; /* what follows on this line is no new line */
}

/* The generation ends inside a call. */
static void last_call(split *s) {
    if (s->told || args_may_begin(&s->call)) {
        end_call(s, s->call.state == CALL_BODY ? SPLIT_CALL_END : SPLIT_CALL_CUT, s->b.n);
        return;
    }
    if (call_committed(&s->call, &s->b)) consume(s, s->b.n);
    s->call.active = false;
    emit(s, SPLIT_TEXT, s->b.n);
    consume(s, s->b.n);
}

static bool step_answer_call(split *s, bool final) {
    switch (call_step(&s->call, &s->b, s->tools, false, final)) {
    case CALL_WAIT:
        if (final)
            last_call(s);
        else
            tell_call(s, false);
        return false;
    case CALL_REJECT: /* prose: its first character is text, the rest is read again */
        s->call.active = false;
        emit(s, SPLIT_TEXT, s->call_from + 1);
        consume(s, s->call_from + 1);
        s->line_start = false;
        s->after_call = false;
        return true;
    case CALL_COMPLETE: end_call(s, SPLIT_CALL_END, s->call.at); return true;
    }
    return false;
}

/* Behind a call: drop closing tags; keep white space only when text follows text. */
static bool step_after_call(split *s, bool final) {
    const size_t at = blanks(s, 0);
    size_t n;
    const tag_match m = call_closer(&s->b, at, &n);
    if (m == TAG_WHOLE) {
        consume(s, at + n);
        return true;
    }
    if (at == s->b.n || m == TAG_PART) {
        if (!final) return false;
        consume(s, s->b.n);
        return false;
    }
    size_t open;
    s->line_start = memchr(s->b.p, '\n', at) != NULL;
    const tag_match o = call_opener(&s->b, at, s->line_start, s->tools, &open);
    if (o == TAG_PART && !final) return false;
    s->after_call = false;
    if (!s->shown_text) consume(s, at);
    return true;
}

/* Decide what stands at `at`. Returns false to wait; else *n bytes are text, or a call begins (*call). */
static bool answer_char(split *s, size_t at, bool final, size_t *n, bool *call) {
    const char c = s->b.p[at];
    *n = 1;
    *call = false;
    if (s->line_start && (c == '`' || c == '~')) {
        if (!fence_line(s, at, final, n)) return false;
        s->line_start = false;
        return true;
    }
    if (c == '<' && !s->fence) {
        size_t open;
        const tag_match m = call_opener(&s->b, at, s->line_start, s->tools, &open);
        if (m == TAG_PART && !final) return false;
        if (m == TAG_PART && (s->b.n - at > 1 || s->line_start)) *n = 0; /* an unfinished tag at the end */
        *call = m == TAG_WHOLE;
        if (*call) *n = open;
    }
    if (c == '\n')
        s->line_start = true;
    else if (!blank(c))
        s->line_start = false;
    return true;
}

static bool step_answer_text(split *s, bool final) {
    size_t at = 0, keep = 0; /* keep: end of what is text for sure; white space behind it waits */
    while (at < s->b.n) {
        size_t n;
        bool call;
        const size_t next = blanks(s, at);
        if (next > at) { /* white space waits for what follows */
            if (memchr(s->b.p + at, '\n', next - at)) s->line_start = true;
            at = next;
            if (at == s->b.n) break;
        }
        if (!answer_char(s, at, final, &n, &call)) break;
        if (call) {
            emit(s, SPLIT_TEXT, keep);
            consume(s, keep);
            s->call_from = at - keep;
            call_begin(&s->call, s->call_from, n);
            return true;
        }
        if (n == 0) { /* an unfinished tag at the end of the generation */
            emit(s, SPLIT_TEXT, keep);
            consume(s, s->b.n);
            return false;
        }
        at += n;
        keep = at;
    }
    if (final) keep = s->b.n;
    emit(s, SPLIT_TEXT, keep);
    consume(s, keep);
    return false;
}

static bool step_answer(split *s, bool final) {
    if (!s->begun) return step_answer_start(s, final);
    if (!s->tools) {
        emit(s, SPLIT_TEXT, s->b.n);
        consume(s, s->b.n);
        return false;
    }
    if (s->call.active) return step_answer_call(s, final);
    if (s->after_call) return step_after_call(s, final);
    return step_answer_text(s, final);
}

static void steps(split *s, bool final) {
    while (s->b.n && (s->mode == M_THINK ? step_thought(s, final) : step_answer(s, final))) {
    }
}

/* ---- interface ---- */

bool split_prompt_thinks(str prompt) {
    str rest = prompt;
    ptrdiff_t at;
    bool open = false;
    while ((at = str_find(rest, STR("<think>"))) >= 0) {
        rest = str_skip(rest, (size_t)at + 7);
        open = true;
    }
    return open && str_find(rest, STR("</think>")) < 0 && str_find(rest, STR("<|")) < 0;
}

split *split_new(bool thinking, const json *tools, split_event *fn, void *ctx) {
    split *s = xcalloc(1, sizeof *s);
    s->fn = fn;
    s->ctx = ctx;
    s->tools = json_is(tools, JSON_ARRAY) && tools->n ? tools : NULL;
    s->mode = thinking ? M_THINK : M_ANSWER;
    s->line_start = true;
    return s;
}

void split_calls_first(split *s) { s->calls_first = true; }

void split_push(split *s, str bytes) {
    utf8_feed_bytes(&s->utf8, bytes, &s->b);
    steps(s, false);
}

void split_end(split *s) {
    utf8_feed_end(&s->utf8, &s->b);
    steps(s, true);
}

void split_free(split *s) {
    if (!s) return;
    buf_free(&s->b);
    buf_free(&s->done);
    call_free(&s->call);
    free(s);
}
