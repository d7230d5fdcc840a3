/* Brightness, contrast and saturation of an image of bytes, in place; without Python.

   Factors are 65536ths, and results are cut, not rounded, as torchvision's are. */

#ifndef FLATOUT_AUGMENT_COLOR_H
#define FLATOUT_AUGMENT_COLOR_H

#include <stdint.h>

enum { ONE = 65536, RED = 19589, GREEN = 38470, BLUE = 7471, MOST = 100 * ONE };

typedef struct {
    int32_t brightness, contrast, saturation;
} Factors;

/* -- any processor ---------------------------------------------------------------------------- */

static inline uint8_t as_byte(int32_t value)
{
    value >>= 16;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static inline int32_t gray_of(const uint8_t *p)
{
    return (p[0] * RED + p[1] * GREEN + p[2] * BLUE) >> 16;
}

static void scale(uint8_t *values, int64_t count, int32_t factor, int32_t shift)
{
    for (int64_t i = 0; i < count; i++)
        values[i] = as_byte(values[i] * factor + shift);
}

static int64_t sum_grays(const uint8_t *pixels, int64_t count)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += gray_of(pixels + 3 * i);
    return sum;
}

static void saturate(uint8_t *pixels, int64_t count, int32_t factor)
{
    for (int64_t i = 0; i < count; i++, pixels += 3) {
        int32_t gray = gray_of(pixels) * (ONE - factor);
        for (int k = 0; k < 3; k++)
            pixels[k] = as_byte(pixels[k] * factor + gray);
    }
}

static int64_t sum_bytes(const uint8_t *values, int64_t count)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += values[i];
    return sum;
}

typedef struct {
    void (*scale)(uint8_t *values, int64_t count, int32_t factor, int32_t shift);
    int64_t (*sum_grays)(const uint8_t *pixels, int64_t count);
    void (*saturate)(uint8_t *pixels, int64_t count, int32_t factor);
} Colors;

/* -- all of it -------------------------------------------------------------------------------- */

/* An image of `count` pixels of 1 or 3 channels. */
static void adjust(uint8_t *pixels, int64_t count, int64_t channels, const Factors *by,
                   const Colors *with)
{
    if (by->brightness != ONE)
        with->scale(pixels, count * channels, by->brightness, 0);
    if (by->contrast != ONE) {
        int64_t sum = channels == 3 ? with->sum_grays(pixels, count) : sum_bytes(pixels, count);
        /* The mean, in 65536ths, rounded. */
        int64_t mean = (sum * ONE + count / 2) / count;
        with->scale(pixels, count * channels, by->contrast,
                    (int32_t)(((ONE - by->contrast) * mean) >> 16));
    }
    if (by->saturation != ONE)
        with->saturate(pixels, count, by->saturation);
}

#endif
