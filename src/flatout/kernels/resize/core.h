/* Linear interpolation of 8-bit images in fixed point, separable, without Python.

   A row of the source becomes a row of the result's width once, as 16-bit numbers of 15 bits; two of
   these, weighted, are a row of the result. Weights have 11 bits. Which pixels and which weights is
   not computed here: tables say so, that were made once for a pair of sizes. */

#ifndef FLATOUT_RESIZE_CORE_H
#define FLATOUT_RESIZE_CORE_H

#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* A pixel of the result along one axis: the first of its two of the source, the other being the
   next one, and what each weighs, in 2048ths. */
typedef struct {
    int32_t first;
    int16_t weights[2];
} Pixel;

/* The same for VALUES values of a row (its pixels' channels), as vectors want it: four groups of
   four values, of which groups 0 and 2 come first. A group's bytes lie within 16. */
enum { VALUES = 16 };
typedef struct {
    int32_t offsets[4];
    uint8_t picks[64];   /* of these 16: a value's two bytes, each as 16 bits */
    int16_t weights[32]; /* of the two bytes */
} Values;

typedef struct {
    const uint8_t *source;
    uint8_t *out;
    int64_t source_line, out_line; /* bytes from one row to the next */
    int64_t source_height, source_width, height, width, channels;
    const Pixel *rows, *columns;
    const Values *values; /* of a row; NULL where a group's bytes are further apart */
    int16_t *lines;       /* room for two rows of `line_room` numbers */
} Resize;

static inline int64_t line_room(int64_t width, int64_t channels)
{
    return (width * channels + VALUES - 1) / VALUES * VALUES;
}

/* -- any processor ---------------------------------------------------------------------------- */

static inline void across_channels(const Resize *r, const uint8_t *restrict row,
                                   int16_t *restrict line, int64_t channels)
{
    const int64_t next = r->source_width > 1 ? channels : 0;
    for (int64_t i = 0; i < r->width; i++, line += channels) {
        const uint8_t *pixel = row + r->columns[i].first * channels;
        const int32_t left = r->columns[i].weights[0], right = r->columns[i].weights[1];
        for (int64_t k = 0; k < channels; k++)
            line[k] = (int16_t)((pixel[k] * left + pixel[next + k] * right) >> 4);
    }
}

static void across(const Resize *r, const uint8_t *row, int16_t *line)
{
    if (r->channels == 3)
        across_channels(r, row, line, 3);
    else if (r->channels == 1)
        across_channels(r, row, line, 1);
    else
        across_channels(r, row, line, r->channels);
}

static inline void down(const int16_t *restrict top, const int16_t *restrict bottom,
                        const int16_t *weights, uint8_t *restrict out, int64_t count)
{
    const int32_t upper = weights[0], lower = weights[1];
    for (int64_t i = 0; i < count; i++) {
        int16_t a = (int16_t)((top[i] * upper) >> 16), b = (int16_t)((bottom[i] * lower) >> 16);
        out[i] = (uint8_t)((a + b + 2) >> 2);
    }
}

/* -- AVX2 ------------------------------------------------------------------------------------- */

#ifdef __x86_64__
#define AVX2 __attribute__((target("avx2")))

AVX2 static inline __m256i two_groups(const uint8_t *row, const Values *v, int k)
{
    __m128i low = _mm_loadu_si128((const __m128i *)(row + v->offsets[k]));
    __m128i high = _mm_loadu_si128((const __m128i *)(row + v->offsets[k + 1]));
    __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    __m256i pairs =
        _mm256_shuffle_epi8(bytes, _mm256_loadu_si256((const __m256i *)(v->picks + 16 * k)));
    __m256i weights = _mm256_loadu_si256((const __m256i *)(v->weights + 8 * k));
    return _mm256_srli_epi32(_mm256_madd_epi16(pairs, weights), 4);
}

AVX2 static void across_avx2(const Resize *r, const uint8_t *row, int16_t *line)
{
    const int64_t blocks = line_room(r->width, r->channels) / VALUES;
    for (int64_t i = 0; i < blocks; i++) {
        __m256i even = two_groups(row, r->values + i, 0), odd = two_groups(row, r->values + i, 2);
        /* In each half the even group, then the odd one: in order, as they were laid. */
        _mm256_storeu_si256((__m256i *)(line + VALUES * i), _mm256_packs_epi32(even, odd));
    }
}

AVX2 static inline __m256i weighted(const int16_t *top, const int16_t *bottom, __m256i upper,
                                    __m256i lower)
{
    __m256i a = _mm256_mulhi_epi16(_mm256_loadu_si256((const __m256i *)top), upper);
    __m256i b = _mm256_mulhi_epi16(_mm256_loadu_si256((const __m256i *)bottom), lower);
    return _mm256_srai_epi16(_mm256_add_epi16(_mm256_add_epi16(a, b), _mm256_set1_epi16(2)), 2);
}

AVX2 static void down_avx2(const int16_t *top, const int16_t *bottom, const int16_t *weights,
                           uint8_t *out, int64_t count)
{
    const __m256i upper = _mm256_set1_epi16(weights[0]), lower = _mm256_set1_epi16(weights[1]);
    if (count < 32) {
        down(top, bottom, weights, out, count);
        return;
    }
    for (int64_t i = 0; i < count; i += 32) {
        i = i < count - 32 ? i : count - 32; /* the last step does some again */
        __m256i first = weighted(top + i, bottom + i, upper, lower);
        __m256i second = weighted(top + i + 16, bottom + i + 16, upper, lower);
        __m256i bytes = _mm256_packus_epi16(first, second);
        _mm256_storeu_si256((__m256i *)(out + i), _mm256_permute4x64_epi64(bytes, 0xD8));
    }
}
#endif

/* -- all of it -------------------------------------------------------------------------------- */

typedef void Across(const Resize *r, const uint8_t *row, int16_t *line);
typedef void Down(const int16_t *top, const int16_t *bottom, const int16_t *weights, uint8_t *out,
                  int64_t count);

static inline void resize_with(const Resize *r, Across *across_row, Down *down_rows)
{
    const int64_t room = line_room(r->width, r->channels), next = r->source_height > 1;
    /* Two rows that follow each other never share a place. */
    int64_t held[2] = {-1, -1};
    for (int64_t y = 0; y < r->height; y++) {
        const int64_t first = r->rows[y].first;
        for (int64_t row = first; row <= first + next; row++)
            if (held[row & 1] != row) {
                across_row(r, r->source + row * r->source_line, r->lines + (row & 1) * room);
                held[row & 1] = row;
            }
        down_rows(r->lines + (first & 1) * room, r->lines + ((first + next) & 1) * room,
                  r->rows[y].weights, r->out + y * r->out_line, r->width * r->channels);
    }
}

static void resize(const Resize *r)
{
#ifdef __x86_64__
    if (r->values != NULL && __builtin_cpu_supports("avx2")) {
        resize_with(r, across_avx2, down_avx2);
        return;
    }
#endif
    resize_with(r, across, down);
}

#endif
