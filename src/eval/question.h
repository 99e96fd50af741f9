/* question.h - the answer to a word problem, found in what a model wrote (GSM8K's conventions). */
#ifndef NIBBLE_QUESTION_H
#define NIBBLE_QUESTION_H

#include "base/str.h"

enum { QUESTION_NUMBER = 64 };

/* The number in a form that can be compared as text: no $, commas, leading zeros, or zeros behind the point. Strict: the one
 * behind the last "####". Flexible: the last number anywhere. False: there is none. */
bool question_number(char out[QUESTION_NUMBER], str text, bool strict);
/* What a problem's answer field says: behind "####", else the whole field as a number. */
bool question_expected(char out[QUESTION_NUMBER], str answer);

#endif
