#include "eval/question.h"

#include <string.h>

static bool digit(char c) { return c >= '0' && c <= '9'; }

/* A number that begins at text.p (a sign, a $, digits with commas between groups of three, a fraction); its length or 0. */
static size_t number_at(char out[QUESTION_NUMBER], str text) {
    size_t i = 0, n = 0, kept = 0;
    bool negative = false, point = false;
    for (; i < text.n && (text.p[i] == '$' || text.p[i] == '-'); i++) negative = negative || text.p[i] == '-';
    if (i > 2 || i >= text.n || !digit(text.p[i])) return 0;
    for (; i < text.n && n < QUESTION_NUMBER - 2; i++) {
        const char c = text.p[i];
        const bool group = c == ',' && !point && i + 3 < text.n && digit(text.p[i + 1]) && digit(text.p[i + 2]) &&
                           digit(text.p[i + 3]) && !(i + 4 < text.n && digit(text.p[i + 4]));
        if (digit(c)) {
            if (n == 1 && out[0] == '0' && !point) n = 0; /* leading zeros */
            out[n++] = c;
        } else if (c == '.' && !point && i + 1 < text.n && digit(text.p[i + 1])) {
            point = true;
            out[n++] = c;
        } else if (!group) {
            break;
        }
    }
    while (i < text.n && digit(text.p[i]))
        i++; /* a number longer than anyone's answer: the rest of it is no other number */
    kept = n;
    if (point) {
        while (out[kept - 1] == '0') kept--;
        if (out[kept - 1] == '.') kept--;
    }
    out[kept] = 0;
    if (negative && strcmp(out, "0") != 0) {
        memmove(out + 1, out, kept + 1);
        out[0] = '-';
    }
    return i;
}

bool question_number(char out[QUESTION_NUMBER], str text, bool strict) {
    char found[QUESTION_NUMBER];
    bool any = false;
    if (strict) {
        for (ptrdiff_t at; (at = str_find(text, STR("####"))) >= 0;) {
            text = str_skip(text, (size_t)at + 4);
            str rest = text;
            while (rest.n && (rest.p[0] == ' ' || rest.p[0] == '\t')) rest = str_skip(rest, 1);
            if (number_at(found, rest)) strcpy(out, found), any = true;
        }
        return any;
    }
    for (size_t i = 0; i < text.n;) {
        /* A minus right behind a digit or letter is an operation, not a sign. */
        const bool bound = text.p[i] == '-' && i > 0 && (digit(text.p[i - 1]) || text.p[i - 1] == ')');
        const size_t n = bound ? 0 : number_at(found, str_skip(text, i));
        if (n) strcpy(out, found), any = true;
        i += n ? n : 1;
    }
    return any;
}

bool question_expected(char out[QUESTION_NUMBER], str answer) {
    return question_number(out, answer, true) ||
           (str_find(answer, STR("####")) < 0 && question_number(out, answer, false));
}
