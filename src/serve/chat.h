/* chat.h - what every API dialect shares: a request in neutral terms, its life, and the answer as it comes.
 *
 * A dialect is a table of functions (chat_dialect). `parse` turns a JSON body into a chat_request; this module renders the
 * template, encodes, submits to the engine, splits the answer into thought, text and tool calls, and calls the dialect
 * back with events while it comes and with the complete answer at the end. A dialect only reads fields and writes JSON.
 *
 * Threads: `parse` runs on the preparing thread and touches nothing but its arguments and the immutable model; everything
 * else runs on the event thread. */
#ifndef NIBBLE_CHAT_H
#define NIBBLE_CHAT_H

#include "base/arena.h"
#include "base/json.h"
#include "engine/engine.h"
#include "serve/fault.h"
#include "serve/http.h"
#include "serve/job.h"

enum { CHAT_MAX_STOPS = 16, CHAT_MAX_TOP_LOGPROBS = 20, CHAT_MAX_CHOICES = 64 };

/* What is served; immutable once loaded. */
typedef struct chat_model {
    const char *name; /* the id under /v1/models; aliases answer too */
    const char *const *aliases;
    int n_aliases;
    engine *g;
    sampler_params defaults; /* generation_config.json, then the command line; stop_ids: the checkpoint's */
    int ctx;                 /* positions of a sequence */
    int max_choices;         /* n at most */
    int max_answers;         /* prompts times n at most: slots and queue */
    int thinking;            /* default of enable_thinking: -1 as the template has it, 0, 1 */
    double deadline_seconds; /* of a request; 0 = none */
    int64_t created;         /* Unix time of the start */
    const int32_t *special;  /* [n_special] ids of special tokens */
    int n_special;
    int32_t think_end; /* id of </think>, or -1 */
    const struct grammar_vocab *vocab;
} chat_model;

typedef enum chat_tool_choice { TOOLS_NONE, TOOLS_AUTO, TOOLS_REQUIRED, TOOLS_NAMED } chat_tool_choice;
typedef enum chat_format { FORMAT_TEXT, FORMAT_JSON_OBJECT, FORMAT_JSON_SCHEMA } chat_format;

/* A prompt that no template makes: token ids, or text when ids is NULL. */
typedef struct chat_prompt {
    str text;
    const int32_t *ids;
    int n_ids;
} chat_prompt;

/* A request in neutral terms. chat_request_init gives every field its default; a dialect sets what its body says. Trees
 * and texts live in `mem` or in the body, which stay until the chat is freed. */
typedef struct chat_request {
    arena *mem;
    /* The prompt: messages (OpenAI's form: [{role, content, reasoning_content, tool_calls, tool_call_id}], checked and
     * brought into the template's form by chat_set_messages), or text or token ids as they are. */
    const json *messages;
    const json *template_args;  /* object whose keys become template variables (chat_template_kwargs), or NULL */
    const chat_prompt *prompts; /* [n_prompts] when messages is NULL; more than one: each is answered n times */
    int n_prompts;
    bool raw_special;       /* text of prompts may spell control tokens (completions) */
    int thinking;           /* -1 as the model's default, 0 off, 1 on */
    str reasoning_effort;   /* template variable of that name when not empty */
    bool generation_prompt; /* default true */
    bool continue_final;    /* the last message is an assistant's and goes on */
    /* Tools in OpenAI's form ([{type: "function", function: {name, parameters, ...}}]); NULL: none. Set by chat_set_tools. */
    const json *tools;
    chat_tool_choice tool_choice;
    str tool_name; /* TOOLS_NAMED */
    bool parallel_tool_calls;
    chat_format format;
    const json *schema; /* FORMAT_JSON_SCHEMA */
    /* Sampling; starts as the model's defaults. */
    sampler_params sampling;
    bool has_seed;
    int max_tokens; /* 0 = the rest of the context */
    int n;
    bool logprobs, prompt_logprobs; /* the latter: of the prompt too; needs the former */
    bool no_answer;                 /* nothing but the prompt is wanted (max_tokens 0 with echo) */
    int top_logprobs;
    const char *stops[CHAT_MAX_STOPS];
    int n_stops;
    const int32_t *stop_ids; /* besides the checkpoint's */
    int n_stop_ids;
    bool ignore_eos;
    int depth; /* drafts per round, -1 = the server's */
    int priority;
    /* How the answer is shown. */
    bool stream, include_usage, continuous_usage;
    bool separate_reasoning; /* default true; false: the thought is part of the text, tags included */
    bool return_token_ids;
    bool split; /* default true: part thought and calls from text; false: text as it is (completions) */
} chat_request;

typedef struct chat_usage {
    int prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens;
    int64_t rounds, drafted, accepted; /* of speculation; rounds 0: none happened */
} chat_usage;

typedef enum chat_finish { CHAT_OPEN, CHAT_STOP, CHAT_LENGTH, CHAT_CALLS, CHAT_DEADLINE, CHAT_CANCELLED } chat_finish;
/* OpenAI's word: "stop", "length", "tool_calls"; a deadline is "length". */
const char *chat_finish_word(chat_finish f);

typedef struct chat_call {
    char id[32]; /* "call_" and 24 characters */
    char *name;
    buf arguments; /* a JSON object as text */
} chat_call;

typedef struct chat_token {
    int32_t id;
    double logprob;
} chat_token;

typedef struct chat chat;

/* One answer of `n`, or of n for each of several prompts. */
typedef struct chat_choice {
    chat *owner;
    int index;           /* prompt * n + which of its answers */
    buf text, reasoning; /* so far */
    chat_call *calls;
    int n_calls;
    chat_finish finish;
    ptrdiff_t stop_index; /* of request.stops when a stop string ended it, else -1 */
    int32_t stop_id;      /* token id that ended it, else -1 */
    chat_usage usage;     /* of this choice; complete once finished */
    /* With request.logprobs or return_token_ids: every token so far. */
    chat_token *tokens;
    int n_tokens, cap_tokens;
    int32_t *top_ids; /* [n_tokens * request.top_logprobs] */
    double *top_logprobs;
    struct chat_parser *parser;
} chat_choice;

typedef enum chat_event_kind {
    EVENT_PROMPT,     /* the part's prompt is scored; choice: its first */
    EVENT_REASONING,  /* text: a piece of the thought */
    EVENT_TEXT,       /* text: a piece of the answer */
    EVENT_CALL_BEGIN, /* call: index; its id and name stand in choice->calls[call] */
    EVENT_CALL_ARGS,  /* call; text: a piece of the arguments */
    EVENT_CALL_END,   /* call */
    EVENT_FINISH      /* choice->finish is set; the last event of a choice */
} chat_event_kind;

/* A prompt on its way through the engine; one of `prompts`, or the only one there is. */
typedef struct chat_part {
    chat *owner;
    int from, n; /* its tokens: owner->prompt.v[from .. from + n) */
    int first;   /* choices[first .. first + request.n) answer it */
    int open;    /* of these, not finished */
    job *job;    /* NULL once over */
    /* With request.prompt_logprobs: the prompt's tokens so far (tokens, n_tokens, top_*), the first without a value (NaN). */
    chat_choice scored;
} chat_part;

/* Pieces are whole UTF-8 characters. Adjacent pieces of a kind that arrive together come as one event. */
typedef struct chat_event {
    chat_event_kind kind;
    chat_choice *choice;
    int call;
    str text;
    int first_token, n_tokens; /* of choice->tokens: those up to here that no event carried yet */
} chat_event;

/* What a dialect implements. */
typedef struct chat_dialect {
    const char *path; /* "/v1/chat/completions" */
    /* Body (an object) to c->request; false with a fault that names the field. Unknown fields: chat_ignored. Preparing
     * thread. */
    bool (*parse)(chat *c, const json *body, fault *f);
    /* The prompt is accepted (its length is c->prompt_tokens) and in the engine. Streams: headers and opening events. */
    void (*start)(chat *c);
    /* Only for streams. */
    void (*event)(chat *c, const chat_event *ev);
    /* All choices are finished: c->choices. Non-streams: the reply. Streams: closing events, sse_close. */
    void (*finish)(chat *c);
    /* A stream failed: error event and its end. NULL: OpenAI's shape. */
    void (*fail)(chat *c, const fault *f);
    /* A fault as JSON in the dialect's words, also for requests that never became a chat. NULL: OpenAI's. */
    void (*write_fault)(buf *out, const fault *f);
    void (*free)(void *own); /* c->own; may be NULL */
    /* Nothing is generated: `start` answers, from c->prompt_tokens and the like. The prompt may be longer than the context. */
    bool count_only;
} chat_dialect;

struct chat {
    const chat_dialect *dialect;
    const chat_model *model;
    http_call *call; /* NULL: the peer is gone */
    chat_request request;
    char id[40];     /* 24 random characters; the dialect writes its own prefix before it */
    int64_t created; /* Unix time */
    bool streaming;  /* start was called for a stream */
    id_list prompt;  /* of all parts, one behind the other */
    chat_part *parts;
    int n_parts;
    buf rendered; /* the prompt as text; kept only for /render and echo */
    bool keep_rendered;
    int prompt_tokens;
    bool thinks;             /* the prompt ends inside a thought */
    chat_choice *choices;    /* [n_choices] */
    int n_choices;           /* n_parts * request.n */
    int open;                /* choices not finished */
    buf ignored;             /* names of unknown fields, ", " between */
    void *own;               /* the dialect's */
    arena mem;               /* body tree and everything of the request */
    struct grammar *grammar; /* of response_format or tool_choice; NULL once the job has it */
    job_news news;
    const struct chat_env *env;
    double submitted_at, first_token_at, last_news_at;
    struct chat *next, *prev; /* the server's list of chats with a call */
    bool preparing, orphan;   /* with the preparing thread; its call is gone meanwhile */
    bool counted;             /* the metrics know its end */
};

/* ---- the life of a chat (server.c) ---- */

/* What runs chats. */
typedef struct chat_env {
    loop *l;
    job_bridge *bridge;
    struct metrics *metrics;
} chat_env;

chat *chat_new(const chat_dialect *d, const chat_model *m, http_call *call);
/* Body to prompt ids: parse, render, encode, check. The preparing thread. */
bool chat_prepare(chat *c, str body, fault *f);
/* The prompt alone: rendered text, ids, length. Part of chat_prepare. */
bool chat_make_prompt(chat *c, fault *f);
/* Into the engine; answers faults itself. */
void chat_begin(chat *c, const chat_env *env);
/* Answer a fault in the dialect's words and end the generation. */
void chat_fail(chat *c, const fault *f);
/* The peer is gone. */
void chat_gone(chat *c);
void chat_free(chat *c);

/* ---- for parse ---- */

/* Defaults of the model; called before parse. */
void chat_request_init(chat_request *r, const chat_model *m, arena *mem);
/* Check `model`: absent, the served name or an alias, else 404 model_not_found. */
bool chat_check_model(const chat *c, const json *body, fault *f);
/* Check messages in OpenAI's form and bring them into the template's: developer becomes system, system messages are joined
 * into one at the start, argument texts become objects, parts are checked (an image is refused). `param` names the field
 * in faults. */
bool chat_set_messages(chat_request *r, const json *messages, const char *param, fault *f);
/* Check tools in OpenAI's form. An empty array is none. */
bool chat_set_tools(chat_request *r, const json *tools, const char *param, fault *f);
/* Parse JSON text that a dialect wrote (converted messages or tools) into mem; a bug if it is not JSON. */
const json *chat_json(arena *mem, const buf *text);
/* A fault about one of several prompts: its index goes in front. Returns false. */
bool chat_name_prompt(fault *f, int prompt);
/* A copy in mem. NULL-terminated. */
str chat_copy(arena *mem, str s);
/* Temperature, top_p, top_k, min_p, penalties, logit_bias, seed, stop (string or list, under the name given), stop_token_ids,
 * ignore_eos, min_tokens, and the model's extras: what OpenAI-like bodies share. */
bool chat_read_sampling(chat_request *r, const json *body, int vocab, fault *f);
/* Stop strings from a string or a list; `param` names the field. */
bool chat_read_stops(chat_request *r, const json *body, const char *param, fault *f);

/* Fields of an object: absent or null leaves *out as it is and gives true; a wrong type or a value out of range is a fault
 * that names the field. */
bool body_int(const json *body, const char *name, int64_t lo, int64_t hi, int *out, fault *f);
bool body_double(const json *body, const char *name, double lo, double hi, double *out, fault *f);
bool body_bool(const json *body, const char *name, bool *out, fault *f);
bool body_str(const json *body, const char *name, str *out, fault *f);
bool body_object(const json *body, const char *name, const json **out, fault *f);
bool body_array(const json *body, const char *name, const json **out, fault *f);
/* The member, NULL when absent or null. */
const json *body_get(const json *body, const char *name);

/* Members of body that are not in known[] (NULL at the end): listed in X-Nibble-Ignored, logged once per name. */
void chat_ignored(chat *c, const json *body, const char *const *known);

/* ---- for writing ---- */

/* `content` elements of OpenAI's logprobs for tokens [first, first + n), comma-separated. */
void chat_write_logprobs(buf *out, const chat_choice *ch, int first, int n);
/* Comma-separated ids of the same. */
void chat_write_ids(buf *out, const chat_choice *ch, int first, int n);
chat_usage chat_total_usage(const chat *c); /* over all choices; each prompt counted once */
/* OpenAI's usage object with nibble's `speculative`. */
void chat_write_usage(buf *out, const chat_usage *u);
/* X-Request-Id, X-Nibble-Ignored and the like: before the reply or sse_open. */
void chat_reply_headers(chat *c);

#endif
