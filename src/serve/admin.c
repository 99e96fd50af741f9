/* Endpoints that read: health, models, metrics, server_info, version; access: keys and CORS. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "serve/page.h"
#include "serve/server_impl.h"

/* ---- access ---- */

static bool origin_allowed(const server *s, const char *origin) {
    for (int i = 0; i < s->o->cors.n; i++)
        if (strcmp(s->o->cors.v[i], "*") == 0 || strcmp(s->o->cors.v[i], origin) == 0) return true;
    return false;
}

void admin_cors(server *s, http_call *c) {
    const char *origin = http_call_header(c, "Origin");
    if (!origin || !origin_allowed(s, origin)) return;
    http_reply_header(c, "Access-Control-Allow-Origin", origin);
    http_reply_header(c, "Access-Control-Expose-Headers", "X-Request-Id, X-Nibble-Ignored, Retry-After");
    http_reply_header(c, "Vary", "Origin");
}

void admin_preflight(server *s, http_call *c) {
    const char *origin = http_call_header(c, "Origin"), *wanted = http_call_header(c, "Access-Control-Request-Headers");
    if (origin && origin_allowed(s, origin)) {
        http_reply_header(c, "Access-Control-Allow-Methods", "GET, POST, OPTIONS");
        http_reply_header(c, "Access-Control-Allow-Headers",
                          wanted && strlen(wanted) < 1000 ? wanted : "Authorization, Content-Type, X-Api-Key");
        http_reply_header(c, "Access-Control-Max-Age", "86400");
    }
    http_reply_header(c, "Allow", "GET, POST, OPTIONS");
    http_reply(c, 204, NULL, STR(""));
}

/* Takes the same time whatever the difference, and tells only whether the lengths differ. */
static bool same_key(const char *a, const char *b) {
    const size_t n = strlen(a), m = strlen(b);
    unsigned diff = (unsigned)(n != m);
    for (size_t i = 0; i < n; i++) diff |= (unsigned)(unsigned char)a[i] ^ (unsigned)(unsigned char)b[m ? i % m : 0];
    return diff == 0;
}

bool admin_authorized(server *s, http_call *c) {
    if (s->o->api_keys.n == 0) return true;
    const char *given = http_call_header(c, "Authorization"), *key = http_call_header(c, "X-Api-Key");
    given = given && strncasecmp(given, "Bearer ", 7) == 0 ? given + 7 : NULL;
    bool found = false;
    for (int i = 0; i < s->o->api_keys.n; i++) {
        if (given) found |= same_key(given, s->o->api_keys.v[i]);
        if (key) found |= same_key(key, s->o->api_keys.v[i]);
    }
    return found;
}

/* ---- health ---- */

static void reply_state(http_call *c, bool good, const char *status, int retry) {
    buf b = { 0 };
    char seconds[16];
    buf_printf(&b, "{\"status\":\"%s\"}", status);
    snprintf(seconds, sizeof seconds, "%d", retry);
    if (!good) http_reply_header(c, "Retry-After", seconds);
    http_reply_json(c, good ? 200 : 503, &b);
    buf_free(&b);
}

/* Red only when a restart would help. */
static void get_health(server *s, http_call *c) {
    if (s->state == SERVER_LOADING)
        reply_state(c, false, "loading", 5);
    else if (!server_engine_alive(s))
        reply_state(c, false, "stalled", 30);
    else
        reply_state(c, true, "ok", 0);
}

static void get_ready(server *s, http_call *c) {
    if (s->state == SERVER_LOADING)
        reply_state(c, false, "loading", 5);
    else if (s->state == SERVER_DRAINING)
        reply_state(c, false, "draining", 30);
    else if (!server_engine_alive(s) || !server_engine_beats(s))
        reply_state(c, false, "stalled", 5);
    else
        reply_state(c, true, "ready", 0);
}

/* ---- models ---- */

static void write_model(buf *b, const server *s, const char *name) {
    buf_puts(b, "{\"id\":");
    json_write_str(b, str_of(name));
    buf_printf(b,
               ",\"object\":\"model\",\"created\":%lld,\"owned_by\":\"nibble\",\"root\":", (long long)s->model.created);
    json_write_str(b, str_of(s->name));
    buf_printf(b, ",\"parent\":null,\"max_model_len\":%d}", s->model.ctx);
}

static void get_models(server *s, http_call *c) {
    buf b = { 0 };
    buf_puts(&b, "{\"object\":\"list\",\"data\":[");
    write_model(&b, s, s->name);
    for (int i = 0; i < s->o->aliases.n; i++) {
        buf_byte(&b, ',');
        write_model(&b, s, s->o->aliases.v[i]);
    }
    buf_puts(&b, "]}");
    http_reply_json(c, 200, &b);
    buf_free(&b);
}

static void get_model(server *s, http_call *c, str id) {
    const char *name = str_is(id, s->name) ? s->name : NULL;
    for (int i = 0; !name && i < s->o->aliases.n; i++)
        if (str_is(id, s->o->aliases.v[i])) name = s->o->aliases.v[i];
    if (name) {
        buf b = { 0 };
        write_model(&b, s, name);
        http_reply_json(c, 200, &b);
        buf_free(&b);
    } else {
        fault f = { 0 };
        fault_set(&f, 404, "model_not_found", "the model '" STR_FMT "' is not served here (this is %s)",
                  (int)(id.n > 100 ? 100 : id.n), id.p, s->name);
        http_reply_fault(c, &f);
    }
}

/* ---- information ---- */

static void get_version(server *s, http_call *c) {
    buf b = { 0 };
    buf_printf(&b, "{\"version\":\"%s\",\"commit\":\"%s\"}", s->o->version, s->o->commit);
    http_reply_json(c, 200, &b);
    buf_free(&b);
}

static void write_sampling(buf *b, const sampler_params *p) {
    const struct {
        const char *name;
        double v;
    } fields[] = { { "temperature", p->temperature },
                   { "top_k", p->top_k },
                   { "top_p", p->top_p },
                   { "min_p", p->min_p },
                   { "presence_penalty", p->presence },
                   { "frequency_penalty", p->frequency },
                   { "repetition_penalty", p->repetition },
                   { "min_tokens", p->min_tokens } };
    buf_byte(b, '{');
    for (size_t i = 0; i < ARRAY_LEN(fields); i++) {
        buf_printf(b, "%s\"%s\":", i ? "," : "", fields[i].name);
        json_write_double(b, fields[i].v);
    }
    buf_puts(b, ",\"stop_token_ids\":[");
    for (int i = 0; i < p->n_stop_ids; i++) buf_printf(b, "%s%d", i ? "," : "", p->stop_ids[i]);
    buf_puts(b, "]}");
}

static void write_engine_info(buf *b, const server *s) {
    const engine *g = s->g;
    char plan[500];
    const loop_stats l = loop_counted(s->l);
    buf_printf(b, ",\"context\":%d,\"sequences\":%d,\"chunk\":%d,\"kv_cache\":\"%s\",\"act\":\"%s\",\"depth\":%d",
               s->model.ctx, g->st.slots, g->chunk, dtype_name(g->kv_type), server_act_name(g), s->o->loop.depth);
    buf_printf(b, ",\"device\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"memory_plan\":", g->o->device, g->o->isa,
               g->o->threads);
    memory_plan_text(plan, sizeof plan, &g->plan);
    json_write_str(b, str_of(plan));
    buf_puts(b, ",\"accept_length\":");
    json_write_double(b, l.rounds ? (double)(l.accepted + l.rounds) / (double)l.rounds : 0);
    buf_printf(b, ",\"alarms\":{\"spec_floor\":%lld,\"spec_pinned\":%lld,\"spec_corrupt\":%lld}",
               (long long)l.spec_floor, (long long)l.spec_pinned, (long long)l.spec_corrupt);
    buf_puts(b, ",\"sampling_defaults\":");
    write_sampling(b, &s->model.defaults);
    server_write_formats(b, s);
}

static void get_server_info(server *s, http_call *c) {
    buf b = { 0 };
    static const char *const states[] = { "loading", "ready", "draining" };
    buf_printf(&b, "{\"version\":\"%s\",\"commit\":\"%s\",\"state\":\"%s\",\"model\":", s->o->version, s->o->commit,
               states[s->state]);
    json_write_str(&b, str_of(s->name));
    buf_puts(&b, ",\"path\":");
    json_write_str(&b, str_of(s->o->dir));
    buf_puts(&b, ",\"uptime_seconds\":");
    json_write_double(&b, clock_seconds() - s->started);
    buf_puts(&b, ",\"load_seconds\":");
    json_write_double(&b, s->load_seconds);
    if (s->state != SERVER_LOADING) write_engine_info(&b, s);
    buf_byte(&b, '}');
    http_reply_json(c, 200, &b);
    buf_free(&b);
}

static void get_metrics(server *s, http_call *c) {
    buf b = { 0 };
    const metrics_gauges g = { .preparing = s->n_preparing,
                               .active = s->n_chats,
                               .connections = http_connections(s->h),
                               .ready = s->state == SERVER_READY && server_engine_beats(s),
                               .model = s->name,
                               .version = s->o->version,
                               .uptime_seconds = clock_seconds() - s->started,
                               .load_seconds = s->load_seconds };
    loop_stats l;
    if (s->state != SERVER_LOADING) l = loop_counted(s->l);
    metrics_write(&b, &s->counts, s->state != SERVER_LOADING ? &l : NULL, &g);
    http_reply(c, 200, "text/plain; version=0.0.4; charset=utf-8", buf_view(&b));
    buf_free(&b);
}

static void get_page(server *s, http_call *c) {
    (void)s;
    http_reply_header(c, "Content-Security-Policy", PAGE_SECURITY_POLICY);
    http_reply_header(c, "X-Content-Type-Options", "nosniff");
    http_reply_header(c, "Referrer-Policy", "no-referrer");
    http_reply_header(c, "Cache-Control", "no-cache");
    http_reply(c, 200, "text/html; charset=utf-8", page_html());
}

static const struct {
    const char *path;
    void (*fn)(server *s, http_call *c);
    bool open;
} endpoints[] = { { "/", get_page, true },
                  { "/health", get_health, true },
                  { "/ready", get_ready, true },
                  { "/version", get_version, true },
                  { "/v1/models", get_models, false },
                  { "/metrics", get_metrics, false },
                  { "/server_info", get_server_info, false } };
static const str one_model = { "/v1/models/", 11 };

bool admin_has(str path) {
    for (size_t i = 0; i < ARRAY_LEN(endpoints); i++)
        if (str_is(path, endpoints[i].path)) return true;
    return str_starts(path, one_model);
}

bool admin_request(server *s, http_call *c, str path) {
    for (size_t i = 0; i < ARRAY_LEN(endpoints); i++) {
        if (!str_is(path, endpoints[i].path) || (!endpoints[i].open && !admin_authorized(s, c))) continue;
        endpoints[i].fn(s, c);
        return true;
    }
    if (!str_starts(path, one_model) || !admin_authorized(s, c)) return false;
    get_model(s, c, str_skip(path, one_model.n));
    return true;
}
