/* parser.h - tokens of one choice to the events of chat.h. Private to serve/. */
#ifndef NIBBLE_PARSER_H
#define NIBBLE_PARSER_H

#include "serve/chat.h"

void parser_begin(chat_choice *ch);
void parser_token(chat_choice *ch, int32_t id);
/* The generation is over: what is held back comes out. */
void parser_end(chat_choice *ch);
/* ch->finish is set: the last event. */
void parser_finish(chat_choice *ch);
/* Tell what was gathered since the last event. */
void parser_flush(chat_choice *ch);
/* The generation ended inside its last tool call. */
bool parser_was_cut(const chat_choice *ch);
/* Which of the request's stop strings ended it, or -1. */
int parser_stop(const chat_choice *ch);
void parser_free(chat_choice *ch);

#endif
