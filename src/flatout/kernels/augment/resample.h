/* A part of an image of bytes brought to another size, with antialiasing; without Python.

   torch's `interpolate(mode="bilinear", antialias=True)` of uint8 images, byte for byte: a triangle
   filter, as wide as the pixels that it averages over, first along the rows, then down the columns,
   in fixed point with a rounding after each. */

#ifndef FLATOUT_AUGMENT_RESAMPLE_H
#define FLATOUT_AUGMENT_RESAMPLE_H

#include "fetch.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* Which pixels of the source each pixel of the result is made of, along one axis. */
typedef struct {
    int64_t count;    /* pixels of the result */
    int64_t most;     /* taps that there is room for, even */
    int64_t pairs;    /* of taps that a pixel has at most, in the present part */
    int precision;    /* bits of the weights behind the point */
    int32_t *first;   /* of shape (count,) */
    int32_t *taps;    /* how many there are, at least 1 */
    int16_t *weights; /* of shape (count, most); 0 behind the taps */
    double *exact;    /* the same */
} Axis;

/* What an axis of a part of up to `length` pixels takes at most. */
static inline int64_t most_taps(int64_t length, int64_t count)
{
    double reach = (double)length / (double)count;
    int64_t taps = (int64_t)ceil(reach > 1 ? reach : 1) * 2 + 1;
    return taps + taps % 2;
}

static int make_axis(Axis *axis, int64_t length, int64_t count)
{
    const size_t most = (size_t)most_taps(length, count), pixels = (size_t)count;
    *axis = (Axis){.count = count, .most = (int64_t)most};
    if (most > SIZE_MAX / sizeof(double) / pixels)
        return 0;
    axis->first = malloc(pixels * sizeof *axis->first);
    axis->taps = malloc(pixels * sizeof *axis->taps);
    axis->weights = malloc(pixels * most * sizeof *axis->weights);
    axis->exact = malloc(pixels * most * sizeof *axis->exact);
    return axis->first && axis->taps && axis->weights && axis->exact;
}

static void free_axis(Axis *axis)
{
    free(axis->first);
    free(axis->taps);
    free(axis->weights);
    free(axis->exact);
}

/* Of a part of `length` pixels; `backwards` the last pixel of the result comes first. All as torch
   does it, in doubles, so that the weights are its own. */
static void fill_axis(Axis *axis, int64_t length, int backwards)
{
    const double step = (double)length / (double)axis->count;
    const double reach = step >= 1 ? step : 1, narrow = step >= 1 ? 1 / step : 1;
    const int64_t room = (int64_t)ceil(reach) * 2 + 1;
    double greatest = 0;
    axis->pairs = 1;
    for (int64_t i = 0; i < axis->count; i++) {
        const int64_t at = backwards ? axis->count - 1 - i : i;
        double *exact = axis->exact + at * axis->most, center = step * ((double)i + 0.5), all = 0;
        int64_t first = (int64_t)(center - reach + 0.5), stop = (int64_t)(center + reach + 0.5);
        first = first < 0 ? 0 : first;
        stop = stop < length ? stop : length;
        int64_t taps = stop - first < room ? stop - first : room;
        for (int64_t k = 0; k < taps; k++) {
            double distance = fabs(((double)(k + first) - center + 0.5) * narrow);
            exact[k] = distance < 1 ? 1 - distance : 0;
            all += exact[k];
        }
        for (int64_t k = 0; k < taps; k++) {
            exact[k] /= all;
            greatest = exact[k] > greatest ? exact[k] : greatest;
        }
        axis->first[at] = (int32_t)first;
        axis->taps[at] = (int32_t)taps;
        axis->pairs = (taps + 1) / 2 > axis->pairs ? (taps + 1) / 2 : axis->pairs;
    }
    int bits = 0;
    while (bits < 22 && (int)(0.5 + greatest * (1 << (bits + 1))) < 1 << 15)
        bits++;
    axis->precision = bits;
    for (int64_t at = 0; at < axis->count; at++) {
        const double *exact = axis->exact + at * axis->most;
        int16_t *weights = axis->weights + at * axis->most;
        for (int64_t k = 0; k < axis->most; k++)
            weights[k] = k < axis->taps[at] ? (int16_t)(0.5 + exact[k] * (1 << bits)) : 0;
    }
}

/* -- any processor ---------------------------------------------------------------------------- */

static inline void across_channels(const Axis *axis, const uint8_t *row, uint8_t *out,
                                   int64_t channels)
{
    const int32_t half = 1 << (axis->precision - 1);
    for (int64_t i = 0; i < axis->count; i++, out += channels) {
        const uint8_t *pixel = row + axis->first[i] * channels;
        const int16_t *weights = axis->weights + i * axis->most;
        for (int64_t c = 0; c < channels; c++) {
            int32_t sum = half;
            for (int32_t k = 0; k < axis->taps[i]; k++)
                sum += pixel[k * channels + c] * weights[k];
            sum >>= axis->precision;
            out[c] = (uint8_t)(sum > 255 ? 255 : sum);
        }
    }
}

static void across(const Axis *axis, const uint8_t *row, uint8_t *out, int64_t channels)
{
    if (channels == 3)
        across_channels(axis, row, out, 3);
    else if (channels == 1)
        across_channels(axis, row, out, 1);
    else
        across_channels(axis, row, out, channels);
}

static void down(const uint8_t *const *rows, const int16_t *weights, int64_t taps, int precision,
                 uint8_t *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        int32_t sum = 1 << (precision - 1);
        for (int64_t k = 0; k < taps; k++)
            sum += rows[k][i] * weights[k];
        sum >>= precision;
        out[i] = (uint8_t)(sum > 255 ? 255 : sum);
    }
}

static void between(const uint8_t *upper, const uint8_t *lower, int32_t weight, uint8_t *out,
                    int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = (uint8_t)((upper[i] * (16384 - weight) + lower[i] * weight + 8192) >> 14);
}

/* -- all of it -------------------------------------------------------------------------------- */

/* By vectors, or by none; a narrow row takes none. */
typedef struct {
    int64_t width;
    void (*between)(const uint8_t *upper, const uint8_t *lower, int32_t weight, uint8_t *out,
                    int64_t count);
    void (*down)(const uint8_t *const *rows, const int16_t *weights, int64_t taps, int precision,
                 uint8_t *out, int64_t count);
} Downs;

static const Downs plain_downs = {0, between, down};

/* What the images of a call share. `lines`: room for rows of the result's width, as many as a pixel
   has taps down; `ring`: those that a row of the result is made of. `table`: the weights across, as
   vectors want them. */
typedef struct {
    Axis across, down;
    uint8_t *lines;
    const uint8_t **ring;
    int32_t *table;
    int64_t line;
} Resampler;

enum { AHEAD = 16 }; /* bytes that vectors may read or write behind a row */

static int make_resampler(Resampler *r, int64_t height, int64_t width, int64_t out_height,
                          int64_t out_width, int64_t channels)
{
    memset(r, 0, sizeof *r);
    if (!make_axis(&r->across, width, out_width) || !make_axis(&r->down, height, out_height))
        return 0;
    r->line = out_width * channels + 2 * AHEAD;
    r->lines = malloc((size_t)(r->down.most * r->line));
    r->ring = malloc((size_t)r->down.most * sizeof *r->ring);
    r->table = malloc((size_t)((out_width + 8) * r->across.most * 2) * sizeof *r->table);
    return r->lines && r->ring && r->table;
}

static void free_resampler(Resampler *r)
{
    free_axis(&r->across);
    free_axis(&r->down);
    free(r->lines);
    free(r->ring);
    free(r->table);
}

#ifdef __x86_64__
#define AVX2 __attribute__((target("avx2")))

/* For eight pixels, and for each two of their taps: what pixels 0 and 4, 1 and 5, 2 and 6, 3 and 7
   are multiplied by, in 32 bytes each. Pixels behind the last weigh nothing. */
static void fill_table(Resampler *r)
{
    const Axis *axis = &r->across;
    int32_t *table = r->table;
    for (int64_t i = 0; i < axis->count; i += 8)
        for (int64_t pair = 0; pair < axis->pairs; pair++)
            for (int k = 0; k < 8; k++, table += 4) {
                const int64_t at = i + k / 2 + (k % 2) * 4;
                const int16_t *w = axis->weights + at * axis->most + 2 * pair;
                table[0] = at < axis->count ? w[1] * 65536 | w[0] : 0;
                table[1] = table[2] = table[3] = table[0];
            }
}

/* Two pixels of the result: sums of two taps each, of 32 bits, by channel. */
AVX2 static inline __m256i two_pixels(const uint8_t *one, const uint8_t *other, __m256i picks,
                                      const int32_t *table)
{
    __m256i bytes = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)one));
    bytes = _mm256_inserti128_si256(bytes, _mm_loadu_si128((const __m128i *)other), 1);
    return _mm256_madd_epi16(_mm256_shuffle_epi8(bytes, picks),
                             _mm256_loadu_si256((const __m256i *)table));
}

/* Three or four channels. Reads up to 16 bytes behind the pixels that weigh something, and writes as
   many behind the row. */
AVX2 static inline void across_pairs(const Resampler *r, const uint8_t *row, uint8_t *out,
                                     const int64_t channels, const int64_t pairs)
{
    const Axis *axis = &r->across;
    const __m256i picks = _mm256_broadcastsi128_si256(
        channels == 3 ? _mm_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1)
                      : _mm_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1));
    const __m256i closer = _mm256_broadcastsi128_si256(
        channels == 3 ? _mm_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1)
                      : _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m256i half = _mm256_set1_epi32(1 << (axis->precision - 1));
    const __m128i places = _mm_cvtsi32_si128(axis->precision);
    const int64_t count = axis->count;
    const int32_t *table = r->table;
    for (int64_t i = 0; i < count; i += 8, out += 8 * channels) {
        __m256i sums[4];
        for (int k = 0; k < 4; k++) {
            /* Behind the last pixel the first is taken, with no weight. */
            const uint8_t *one = row + axis->first[i + k < count ? i + k : 0] * channels;
            const uint8_t *other = row + axis->first[i + k + 4 < count ? i + k + 4 : 0] * channels;
            sums[k] = half;
            for (int64_t pair = 0; pair < pairs; pair++, one += 2 * channels, other += 2 * channels)
                sums[k] = _mm256_add_epi32(
                    sums[k], two_pixels(one, other, picks, table + 32 * pair + 8 * k));
            sums[k] = _mm256_srl_epi32(sums[k], places);
        }
        table += 32 * pairs;
        __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                                            _mm256_packs_epi32(sums[2], sums[3]));
        bytes = _mm256_shuffle_epi8(bytes, closer);
        _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(bytes));
        _mm_storeu_si128((__m128i *)(out + 4 * channels), _mm256_extracti128_si256(bytes, 1));
    }
}

AVX2 static void across_avx2(const Resampler *r, const uint8_t *row, uint8_t *out,
                             int64_t channels)
{
    if (channels == 3 && r->across.pairs == 1)
        across_pairs(r, row, out, 3, 1);
    else if (channels == 3)
        across_pairs(r, row, out, 3, r->across.pairs);
    else
        across_pairs(r, row, out, 4, r->across.pairs);
}
#endif

/* A row of the part, which reaches up to `end`, in the result's width. */
static void one_line(const Resampler *r, const uint8_t *row, const uint8_t *end, uint8_t *out,
                     int64_t length, int64_t channels, int vectors)
{
#ifdef __x86_64__
    const int64_t read = (length + 2 * r->across.pairs - 3) * channels + AHEAD;
    if (vectors >= 32 && (channels == 3 || channels == 4) && read <= end - row) {
        across_avx2(r, row, out, channels);
        return;
    }
#endif
    (void)end, (void)length, (void)vectors;
    across(&r->across, row, out, channels);
}

/* A part of an image, whose rows are `pitch` bytes apart in memory that ends at `end`. */
typedef struct {
    const uint8_t *first, *end;
    int64_t pitch, height, width;
} Part;

static void resample(Resampler *r, const Part *part, uint8_t *out, int64_t channels,
                     int left_to_right, int upside_down, int vectors, const Downs *downs)
{
    const Axis *axis = &r->down;
    const int64_t bytes = r->across.count * channels;
    const Downs *with = bytes < downs->width ? &plain_downs : downs;
    fill_axis(&r->across, part->width, left_to_right);
    fill_axis(&r->down, part->height, 0);
#ifdef __x86_64__
    if (vectors >= 32)
        fill_table(r);
#endif
    int64_t next = axis->first[0];
    for (int64_t y = 0; y < axis->count; y++) {
        const int64_t first = axis->first[y], taps = axis->taps[y];
        const int16_t *weights = axis->weights + y * axis->most;
        uint8_t *line = out + (upside_down ? axis->count - 1 - y : y) * bytes;
        for (; next < first + taps; next++) {
            const uint8_t *row = part->first + next * part->pitch;
            if (next + ROWS_AHEAD < part->height)
                fetch(row + ROWS_AHEAD * part->pitch, part->width * channels);
            one_line(r, row, part->end, r->lines + next % axis->most * r->line, part->width,
                     channels, vectors);
        }
        for (int64_t k = 0; k < taps; k++)
            r->ring[k] = r->lines + (first + k) % axis->most * r->line;
        if (taps == 2 && axis->precision == 14 && weights[0] + weights[1] == 16384)
            with->between(r->ring[0], r->ring[1], weights[1], line, bytes);
        else
            with->down(r->ring, weights, taps, axis->precision, line, bytes);
    }
}

#endif
