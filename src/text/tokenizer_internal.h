/* tokenizer_internal.h - the tokenizer as its parts see it (internal to src/text/tokenizer*.c). */
#ifndef NIBBLE_TOKENIZER_INTERNAL_H
#define NIBBLE_TOKENIZER_INTERNAL_H

#include "base/strtab.h"
#include "text/bpe.h"
#include "text/pretok.h"
#include "text/tokenizer.h"
#include "text/tokenizer_added.h"

struct tokenizer {
    bpe model;
    pretok *pre;
    bool nfc;
    int vocab;          /* highest id + 1, added tokens included */
    int32_t bos;        /* the BOS that tokenizer_config.json asks for, or -1 */
    added_token *added; /* [n_added] */
    int n_added;
    strtab by_content;     /* of added tokens */
    int32_t *added_at;     /* [vocab] index in added + 1, or 0 */
    token_trie raw;        /* matched in the text as given */
    token_trie normalized; /* matched in normalized text */
    arena mem;             /* contents of added tokens */
};

#endif
