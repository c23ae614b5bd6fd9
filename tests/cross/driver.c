/* Reads golden vectors that tests/cross/vectors.py wrote with the reference, computes them on every
 * path this CPU has, and compares bits. Knows no Python. Numbers in the file are little-endian.
 */
#include "cellpipe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static FILE *file;

static void *room(size_t n)
{
    char *p = calloc(1, n + 128);
    if (p == NULL)
        exit(3);
    return p + (64 - (size_t)p % 64) % 64; /* never freed: a process lives for one file */
}

static uint8_t *bytes(size_t n)
{
    uint8_t *p = room(n);
    if (n && fread(p, 1, n, file) != n) {
        fprintf(stderr, "the file ends early\n");
        exit(3);
    }
    return p;
}

static uint32_t word(void)
{
    uint8_t *p = bytes(4);
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static int32_t number(void)
{
    return (int32_t)word();
}

static float *floats(size_t n)
{
    float *out = room(n * sizeof(float));
    size_t i;
    for (i = 0; i < n; i++) {
        uint32_t u = word();
        memcpy(out + i, &u, sizeof u);
    }
    return out;
}

/* Their number, then they themselves; NULL for none. */
static float *optional_floats(void)
{
    size_t n = (size_t)number();
    return n ? floats(n) : NULL;
}

static cp_matrix matrix(void)
{
    cp_matrix m;
    m.kind = number();
    m.rows = number();
    m.cols = number();
    m.chunk_rows = number();
    m.num_bytes = word();
    m.data = bytes((size_t)m.num_bytes);
    return m;
}

static int failures;

static void check(const char *what, int32_t path, int32_t threads, int code, const void *got,
                  const void *want, size_t n)
{
    int same = code == CP_OK && memcmp(got, want, n) == 0;
    printf("path %d threads %d %s: %s\n", (int)path, (int)threads, what,
           same ? "same bits" : "DIFFERS");
    failures += !same;
}

static void test_matmul(cp_engine *engine, int32_t path, int32_t threads, const cp_matrix *m,
                        const float *x, int32_t rows, int32_t terms, const float *want)
{
    size_t n = (size_t)rows * (size_t)m->rows * sizeof(float);
    uint64_t size = cp_matmul_scratch(engine, m, rows);
    float *out = room(n);
    cp_fault fault;
    int code = cp_matmul(engine, m, x, rows, terms, out, room((size_t)size), size, &fault);
    check("matmul", path, threads, code, out, want, n);
}

/* One group with its head, two sequences from position 0. */
typedef struct {
    cp_group group;
    cp_layer layers[8];
    cp_matrix head;
    float logit_softcap;
    float *final_norm, *hidden, *want_hidden, *want_logits;
    int32_t *want_largest;
    int32_t num_rows[2], pages_each;
    size_t page_values;
    uint16_t *want_pages;
} model;

static model *read_model(void)
{
    model *t = room(sizeof *t);
    cp_group *g = &t->group;
    size_t d, i, n;
    g->hidden_size = number();
    g->intermediate_size = number();
    g->num_heads = number();
    g->num_kv_heads = number();
    g->head_dim = number();
    g->half_pairing = number();
    g->num_positions = number();
    g->num_layers = number();
    g->gelu_tanh = number();
    g->norm_eps = *floats(1);
    g->score_scale = *floats(1);
    g->score_softcap = *floats(1);
    t->logit_softcap = *floats(1);
    d = (size_t)g->hidden_size;
    for (i = 0; i < (size_t)g->num_layers; i++) {
        cp_layer *l = &t->layers[i];
        l->input_norm = floats(d);
        l->post_norm = floats(d);
        l->q = matrix();
        l->k = matrix();
        l->v = matrix();
        l->o = matrix();
        l->gate = matrix();
        l->up = matrix();
        l->down = matrix();
        l->window = number();
        l->q_bias = optional_floats();
        l->k_bias = optional_floats();
        l->v_bias = optional_floats();
        l->q_norm = optional_floats();
        l->k_norm = optional_floats();
        l->attention_out_norm = optional_floats();
        l->mlp_out_norm = optional_floats();
        l->rope_cos = optional_floats();
        l->rope_sin = optional_floats();
    }
    g->layers = t->layers;
    t->final_norm = floats(d);
    t->head = matrix();
    t->num_rows[0] = number();
    t->num_rows[1] = number();
    t->pages_each = number();
    n = (size_t)(t->num_rows[0] + t->num_rows[1]);
    t->hidden = floats(n * d);
    t->want_hidden = floats(n * d);
    t->want_logits = floats(n * (size_t)t->head.rows);
    t->want_largest = room(n * sizeof(int32_t));
    for (i = 0; i < n; i++)
        t->want_largest[i] = number();
    t->page_values = (size_t)(g->num_layers * g->num_kv_heads * 2 * 16 * g->head_dim);
    n = 2 * (size_t)t->pages_each * t->page_values;
    t->want_pages = room(n * 2);
    for (i = 0; i < n; i++) {
        uint8_t *p = bytes(2);
        t->want_pages[i] = (uint16_t)(p[0] | p[1] << 8);
    }
    return t;
}

static void test_model(cp_engine *engine, int32_t path, int32_t threads, const model *t)
{
    int32_t rows = t->num_rows[0] + t->num_rows[1], i;
    size_t n = (size_t)rows * (size_t)t->group.hidden_size * sizeof(float), logits_bytes;
    size_t pages_bytes = 2 * (size_t)t->pages_each * t->page_values * 2;
    uint16_t *pages = room(pages_bytes), *addresses[2][8];
    cp_sequence sequences[2];
    float *hidden = room(n), *logits;
    int32_t *largest = room((size_t)rows * sizeof(int32_t));
    uint64_t size = cp_forward_scratch(engine, &t->group, rows);
    cp_fault fault;
    int code, s;
    memcpy(hidden, t->hidden, n);
    for (s = 0; s < 2; s++) {
        for (i = 0; i < t->pages_each; i++)
            addresses[s][i] = pages + (size_t)(s * t->pages_each + i) * t->page_values;
        sequences[s].start_position = 0;
        sequences[s].num_rows = t->num_rows[s];
        sequences[s].num_pages = t->pages_each;
        sequences[s].pages = addresses[s];
    }
    code = cp_forward(engine, &t->group, sequences, 2, hidden, rows, room((size_t)size), size,
                      &fault);
    check("hidden states", path, threads, code, hidden, t->want_hidden, n);
    check("keys and values", path, threads, code, pages, t->want_pages, pages_bytes);
    logits_bytes = (size_t)rows * (size_t)t->head.rows * sizeof(float);
    logits = room(logits_bytes);
    size = cp_logits_scratch(engine, &t->head, rows);
    code = cp_logits(engine, &t->head, t->final_norm, t->group.norm_eps, t->logit_softcap,
                     t->want_hidden, rows, logits, largest, room((size_t)size), size, &fault);
    check("logits", path, threads, code, logits, t->want_logits, logits_bytes);
    check("largest logits", path, threads, code, largest, t->want_largest,
          (size_t)rows * sizeof(int32_t));
}

int main(int argc, char **argv)
{
    int32_t kind, path, threads;
    if (argc != 2 || (file = fopen(argv[1], "rb")) == NULL)
        return 3;
    while ((kind = number()) != 0) { /* 0 ends the file */
        cp_matrix m = {0};
        float *x = NULL, *want = NULL;
        int32_t rows = 0, terms = 0;
        model *t = NULL;
        if (kind == 1) {
            m = matrix();
            rows = number();
            terms = number();
            x = floats((size_t)rows * (size_t)m.cols);
            want = floats((size_t)rows * (size_t)m.rows);
        } else {
            t = read_model();
        }
        for (path = 0; path < CP_NUM_PATHS; path++)
            for (threads = 1; threads <= 2 && cp_has_path(path); threads++) {
                cp_engine *engine = cp_engine_new(path, threads);
                if (kind == 1)
                    test_matmul(engine, path, threads, &m, x, rows, terms, want);
                else
                    test_model(engine, path, threads, t);
                cp_engine_free(engine);
            }
    }
    printf("%d differ\n", failures);
    return failures ? 1 : 0;
}
