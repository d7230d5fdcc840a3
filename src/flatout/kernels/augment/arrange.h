/* A part of an image in one of eight orientations; without Python. */

#ifndef FLATOUT_AUGMENT_ARRANGE_H
#define FLATOUT_AUGMENT_ARRANGE_H

#include "fetch.h"

#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* An orientation: mirrored left to right where MIRRORED is in it, then turned by 0 to 3 quarters to
   the left. */
enum { MIRRORED = 4, TURNS = 3, ORIENTATIONS = 8 };

typedef struct {
    int64_t height, width;               /* of an image of the source */
    int64_t out_height, out_width, pixel; /* bytes of a pixel */
} Sizes;

/* Pixels in a row of the result, from pixels of the source that are `step` bytes apart. */
static inline void copy_pixels(uint8_t *restrict out, const uint8_t *source, int64_t step,
                               int64_t count, int64_t pixel)
{
    for (int64_t i = 0; i < count; i++, out += pixel, source += step)
        memcpy(out, source, (size_t)pixel);
}

#ifdef __x86_64__
/* Five pixels of three bytes at a time, last first. Writes and reads stay within the row. */
__attribute__((target("ssse3"))) static void mirror_3(uint8_t *restrict out, const uint8_t *last,
                                                      int64_t count)
{
    const __m128i picks = _mm_setr_epi8(13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, -1);
    int64_t i = 0;
    for (; i + 6 <= count; i += 5) {
        __m128i five = _mm_loadu_si128((const __m128i *)(last + 3 - 16 - 3 * i));
        _mm_storeu_si128((__m128i *)(out + 3 * i), _mm_shuffle_epi8(five, picks));
    }
    copy_pixels(out + 3 * i, last - 3 * i, -3, count - i, 3);
}
#endif

static void copy_row(uint8_t *out, const uint8_t *source, int64_t step, int64_t count,
                     int64_t pixel, int vectors)
{
    (void)vectors;
    if (step == pixel)
        memcpy(out, source, (size_t)(count * pixel));
#ifdef __x86_64__
    else if (step == -3 && pixel == 3 && vectors)
        mirror_3(out, source, count);
#endif
    else if (pixel == 3)
        copy_pixels(out, source, step, count, 3);
    else if (pixel == 1)
        copy_pixels(out, source, step, count, 1);
    else if (pixel == 4)
        copy_pixels(out, source, step, count, 4);
    else if (pixel == 12)
        copy_pixels(out, source, step, count, 12);
    else
        copy_pixels(out, source, step, count, pixel);
}

/* One image. A row of the result is a row or a column of the source, in either direction; what lies
   outside the source is 0. `vectors`: bytes of those that may be used, or 0. */
static void arrange(const Sizes *im, const uint8_t *source, uint8_t *out, int64_t top,
                    int64_t left, int64_t orientation, int vectors)
{
    const int64_t turns = orientation & TURNS, mirrored = (orientation & MIRRORED) != 0;
    const int64_t along_rows = turns % 2 == 0, line = im->out_width * im->pixel;
    const int64_t side = along_rows ? im->out_width : im->out_height;
    if (orientation == 0 && top == 0 && left == 0 && im->out_height == im->height &&
        im->out_width == im->width) {
        memcpy(out, source, (size_t)(im->out_height * line));
        return;
    }
    const int64_t source_line = im->width * im->pixel;
    for (int64_t i = 0; i < im->out_height; i++, out += line) {
        const int64_t later = top + i + ROWS_AHEAD;
        if (mirrored && along_rows && later >= 0 && later < im->height)
            fetch(source + later * source_line, source_line);
        /* The place of the row's pixel j within the part: fixed in one direction, and in the other
           one j or, backwards, side - 1 - j. */
        int64_t fixed = (turns == 1 || turns == 2) ? im->out_height - 1 - i : i;
        int64_t backwards = along_rows ? (turns == 2) != mirrored : turns == 3;
        if (!along_rows && mirrored)
            fixed = im->out_height - 1 - fixed;
        const int64_t row = along_rows ? top + fixed : top, column = along_rows ? left : left + fixed;
        const int64_t begin = along_rows ? left : top;
        const int64_t length = along_rows ? im->width : im->height;
        const int64_t place = along_rows ? row : column;
        const int64_t places = along_rows ? im->height : im->width;
        /* Of the part's pixels in this direction, those that the source has. */
        int64_t first = begin < 0 ? -begin : 0, stop = length - begin < side ? length - begin : side;
        if (place < 0 || place >= places || first >= stop) {
            memset(out, 0, (size_t)line);
            continue;
        }
        const int64_t distance = (along_rows ? 1 : im->width) * im->pixel;
        const int64_t from = backwards ? side - stop : first, until = from + stop - first;
        const int64_t at = begin + (backwards ? stop - 1 : first);
        const uint8_t *pixel =
            source + (along_rows ? row * im->width + at : at * im->width + column) * im->pixel;
        memset(out, 0, (size_t)(from * im->pixel));
        copy_row(out + from * im->pixel, pixel, backwards ? -distance : distance, stop - first,
                 im->pixel, vectors);
        memset(out + until * im->pixel, 0, (size_t)((side - until) * im->pixel));
    }
}

#endif
