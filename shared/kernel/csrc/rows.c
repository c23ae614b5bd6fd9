/* Operations on rows in plain C99 (rows.h). */
#include "rows.h"
#include "numbers.h"

#include <string.h>

int cp_quantize_c(const float *x, int8_t *q, int8_t *low, int16_t *wide, float *d, int32_t *s)
{
    uint32_t max_bits = 0; /* of |x|: the bits of non-negative floats are ordered as they are */
    int32_t rounded[CP_GROUP];
    int32_t i, sum = 0, steps = low ? CP_TWO_TERM_STEPS : 127;
    float amax, id;
    for (i = 0; i < CP_GROUP; i++) {
        uint32_t bits = cp_bits(x[i]) & 0x7fffffffu;
        max_bits = bits > max_bits ? bits : max_bits;
    }
    if (max_bits >= 0x7f800000u)
        return 0;
    amax = cp_float(max_bits);
    if (max_bits < (127u - 100u) << 23) { /* 2^-100 */
        memset(rounded, 0, sizeof rounded);
        *d = 0.0f;
    } else {
        id = (float)steps / amax;
        for (i = 0; i < CP_GROUP; i++) {
            int32_t v = cp_rint_int(x[i] * id);
            v = v > steps ? steps : v;
            v = v < -steps ? -steps : v;
            rounded[i] = v;
            sum += v;
        }
        *d = amax / (float)steps;
    }
    for (i = 0; wide && i < CP_GROUP; i++)
        wide[i] = (int16_t)rounded[i];
    for (i = 0; low && i < CP_GROUP; i++) {
        int32_t v = rounded[i];
        /* floor((v + 127) / 254), shifted to where division rounds down */
        rounded[i] = (v + 127 + CP_FIRST_TERM * 128) / CP_FIRST_TERM - 128;
        low[i] = (int8_t)(v - CP_FIRST_TERM * rounded[i]);
    }
    for (i = 0; i < CP_GROUP; i++)
        q[i] = (int8_t)rounded[i];
    *s = sum;
    return 1;
}

float cp_dot8_c(const float *x, const float *y, int32_t n)
{
    return cp_dot8(x, y, n);
}

void cp_scale_by_c(const float *x, float factor, const float *weight, int32_t n, float *out)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = (x[i] * factor) * weight[i];
}

void cp_rope_c(float *x, const float *cos, const float *sin, int32_t heads, int32_t head_dim,
               int32_t half_pairing)
{
    int32_t half = head_dim / 2, h, i;
    for (h = 0; h < heads; h++, x += head_dim)
        for (i = 0; i < half; i++) {
            int32_t first = half_pairing ? i : 2 * i;
            int32_t second = half_pairing ? i + half : 2 * i + 1;
            float a = x[first], b = x[second];
            x[first] = a * cos[i] - b * sin[i];
            x[second] = a * sin[i] + b * cos[i];
        }
}

void cp_silu_mul_c(float *gate, const float *up, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++) {
        float x = gate[i];
        gate[i] = (x / (1.0f + cp_exp1(-x))) * up[i];
    }
}

void cp_add_to_c(float *x, const float *y, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        x[i] += y[i];
}

int cp_all_finite_c(const float *x, int32_t n)
{
    return cp_all_finite(x, n);
}

void cp_exp_c(const float *x, float *out, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = cp_exp1(x[i]);
}

void cp_to_half_c(const float *x, uint16_t *out, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = (uint16_t)cp_to_half1(x[i]);
}

void cp_from_half_c(const uint16_t *x, float *out, int32_t n)
{
    int32_t i;
    for (i = 0; i < n; i++)
        out[i] = cp_from_half1(x[i]);
}

void cp_widen_c(const uint16_t *keys, const uint16_t *values, int32_t n, int32_t head_dim,
                float *tile)
{
    cp_from_half_c(keys, tile, n * head_dim);
    cp_from_half_c(values, tile + CP_PAGE * head_dim, n * head_dim);
}

int cp_attend_part_c(const float *q, const float *tile, int32_t head_dim, int32_t first, int32_t n,
                     float score_scale, float score_softcap, float *max, float *total, float *acc)
{
    const float *values = tile + CP_PAGE * head_dim;
    float s[CP_PAGE] = {0}, p[CP_PAGE], lane[8], m = *max, page_max;
    int32_t j, i;
    for (j = first; j < n; j++)
        s[j] = cp_dot8(q, tile + j * head_dim, head_dim) * score_scale;
    if (!cp_all_finite(s + first, n - first))
        return 0;
    for (j = first; score_softcap != 0.0f && j < n; j++)
        s[j] = cp_softcap1(s[j], score_softcap);
    page_max = s[first];
    for (j = first + 1; j < n; j++)
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
    for (j = 0; j < first; j++)
        p[j] = 0.0f;
    for (j = n; j < CP_PAGE; j++)
        p[j] = 0.0f;
    for (j = 0; j < 8; j++)
        lane[j] = p[j] + p[8 + j];
    *total += cp_sum_lanes(lane);
    for (i = 0; i < head_dim; i += 8) {
        float sum[8];
        memcpy(sum, acc + i, sizeof sum);
        for (j = first; j < n; j++) {
            const float *v = values + j * head_dim + i;
            float w = p[j];
            int k;
            for (k = 0; k < 8; k++)
                sum[k] += w * v[k];
        }
        memcpy(acc + i, sum, sizeof sum);
    }
    return 1;
}

int cp_attend_c(const float *q, int32_t num, const float *tile, int32_t head_dim, int32_t n,
                float score_scale, float *max, float *total, float *acc)
{
    int32_t h;
    for (h = 0; h < num; h++, q += head_dim, acc += head_dim)
        if (!cp_attend_part_c(q, tile, head_dim, 0, n, score_scale, 0.0f, max + h, total + h, acc))
            return 0;
    return 1;
}

uint64_t cp_read_c(const uint8_t *bytes, uint64_t n)
{
    uint64_t sum[8] = {0}, i, total = 0;
    int j;
    for (i = 0; i + 64 <= n; i += 64)
        for (j = 0; j < 8; j++) {
            uint64_t word;
            memcpy(&word, bytes + i + 8 * (uint64_t)j, sizeof word);
            sum[j] ^= word;
        }
    for (j = 0; j < 8; j++)
        total ^= sum[j];
    return total;
}
