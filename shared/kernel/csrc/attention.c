/* Attention over KV pages, with a running softmax, and the writing of new KV rows. */
#include "internal.h"
#include "numbers.h"

#include <string.h>

/* Where the keys (part 0) or values (part 1) of a head lie in a page: (16, head_dim). */
static uint16_t *page_part(const cp_group *g, const cp_sequence *s, int64_t page, int32_t layer,
                           int32_t kv_head, int32_t part)
{
    size_t tile = (size_t)CP_PAGE * (size_t)g->head_dim;
    size_t head = (size_t)layer * (size_t)g->num_kv_heads + (size_t)kv_head;
    return s->pages[page] + (head * 2 + (size_t)part) * tile;
}

void cp_store_kv(const cp_group *g, const cp_sequence *s, int32_t layer, const float *k,
                 const float *v)
{
    int32_t t, h;
    for (t = 0; t < s->num_rows; t++) {
        int64_t position = s->start_position + t;
        size_t slot = (size_t)(position % CP_PAGE) * (size_t)g->head_dim;
        for (h = 0; h < g->num_kv_heads; h++, k += g->head_dim, v += g->head_dim) {
            cp_to_half(k, page_part(g, s, position / CP_PAGE, layer, h, 0) + slot, g->head_dim);
            cp_to_half(v, page_part(g, s, position / CP_PAGE, layer, h, 1) + slot, g->head_dim);
        }
    }
}

/* One query head against the first n positions of a page. Returns 0 if a score is not finite. */
static int attend_page(const float *q, const float *keys, const float *values, int32_t head_dim,
                       int32_t n, float score_scale, float *max, float *total, float *acc)
{
    float s[CP_PAGE] = {0}, p[CP_PAGE], lane[8], m = *max, page_max;
    int32_t j, i;
    for (j = 0; j < n; j++)
        s[j] = cp_dot8(q, keys + j * head_dim, head_dim) * score_scale;
    if (!cp_all_finite(s, n))
        return 0;
    page_max = s[0];
    for (j = 1; j < n; j++)
        page_max = s[j] > page_max ? s[j] : page_max;
    if (page_max > m) {
        float shift = m - page_max;
        float c = shift < -87.0f ? 0.0f : cp_exp1(shift);
        *total *= c;
        for (i = 0; i < head_dim; i++)
            acc[i] *= c;
        *max = m = page_max;
    }
    for (j = 0; j < CP_PAGE; j++) {
        float x = s[j] - m, e = cp_exp1(x);
        p[j] = x < -87.0f ? 0.0f : e;
    }
    for (j = n; j < CP_PAGE; j++)
        p[j] = 0.0f;
    for (j = 0; j < 8; j++)
        lane[j] = p[j] + p[8 + j];
    *total += cp_sum_lanes(lane);
    for (j = 0; j < n; j++) {
        const float *v = values + j * head_dim;
        float w = p[j];
        for (i = 0; i < head_dim; i++)
            acc[i] += w * v[i];
    }
    return 1;
}

int32_t cp_attention(const cp_group *g, const cp_sequence *s, int32_t layer, const float *q,
                     float *out, float *state, float *tile)
{
    int32_t head_dim = g->head_dim, heads = g->num_heads, repeat = heads / g->num_kv_heads;
    size_t row_size = (size_t)heads * (size_t)head_dim, i;
    size_t num_states = (size_t)s->num_rows * (size_t)heads;
    float *max = state, *total = state + num_states;
    float *keys = tile, *values = tile + CP_PAGE * head_dim;
    int64_t end = s->start_position + s->num_rows, page;
    int32_t kv_head, t, h, x;
    for (i = 0; i < num_states; i++) {
        max[i] = cp_float(0xff800000u); /* -infinity */
        total[i] = 0.0f;
    }
    memset(out, 0, num_states * (size_t)head_dim * sizeof(float));
    for (kv_head = 0; kv_head < g->num_kv_heads; kv_head++)
        for (page = 0; page * CP_PAGE < end; page++) {
            int64_t base = page * CP_PAGE;
            int32_t filled = end - base < CP_PAGE ? (int32_t)(end - base) : CP_PAGE;
            /* Widened once for all query heads and rows that read it. */
            cp_from_half(page_part(g, s, page, layer, kv_head, 0), keys, filled * head_dim);
            cp_from_half(page_part(g, s, page, layer, kv_head, 1), values, filled * head_dim);
            t = base > s->start_position ? (int32_t)(base - s->start_position) : 0;
            for (; t < s->num_rows; t++) {
                int64_t present = s->start_position + t - base + 1;
                int32_t n = present < CP_PAGE ? (int32_t)present : CP_PAGE;
                for (h = kv_head * repeat; h < (kv_head + 1) * repeat; h++) {
                    size_t at = (size_t)t * row_size + (size_t)h * (size_t)head_dim;
                    size_t st = (size_t)t * (size_t)heads + (size_t)h;
                    if (!attend_page(q + at, keys, values, head_dim, n, g->score_scale, max + st,
                                     total + st, out + at))
                        return t;
                }
            }
        }
    for (i = 0; i < num_states; i++)
        for (x = 0; x < head_dim; x++)
            out[i * (size_t)head_dim + (size_t)x] /= total[i];
    return -1;
}
