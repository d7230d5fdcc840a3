/* What _augment_color.h and _augment_resample.h do, by vectors of WIDTH bytes, with the same bytes as
   results. Included once for each width: V is the type, OP a name's intrinsic, LANES how many times
   16 bytes it has, and these load and store: LOAD, STORE, LOAD_LANES and STORE_LANES, whose lanes
   are so many bytes apart, and SPREAD, which puts 16 bytes into each lane.

   Unpacking bytes and packing them again stays within a lane, so the order is kept. Products of a
   byte and a number of 65536ths are taken apart: `high` holds its whole part, which is signed, and
   `low` the 16 bits behind the point. `avg(a, b)` is (a + b + 1) >> 1 without an overflow, so
   avg(a, b) >> 15 is what a sum of a and b + 1 carries. */

/* value * factor + shift. */
WIDE static void NAME(scale)(uint8_t *values, int64_t count, int32_t factor, int32_t shift)
{
    const V zero = ZERO, high = OP(set1_epi16)((int16_t)(factor >> 16));
    const V low = OP(set1_epi16)((int16_t)factor);
    const V more = OP(set1_epi16)((int16_t)((shift - 1) >> 16));
    const V less = OP(set1_epi16)((int16_t)(shift - 1));
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        V bytes = LOAD(values + i), half[2];
        half[0] = OP(unpacklo_epi8)(bytes, zero), half[1] = OP(unpackhi_epi8)(bytes, zero);
        for (int k = 0; k < 2; k++) {
            V carry = OP(srli_epi16)(OP(avg_epu16)(OP(mullo_epi16)(half[k], low), less), 15);
            V whole = OP(add_epi16)(OP(mullo_epi16)(half[k], high), more);
            half[k] = OP(add_epi16)(OP(add_epi16)(whole, OP(mulhi_epu16)(half[k], low)), carry);
        }
        STORE(values + i, OP(packus_epi16)(half[0], half[1]));
    }
    scale(values + i, count - i, factor, shift);
}

/* A green of 38470 is no int16: it is taken in two halves, beside the red and beside the blue. */
#define RED_GREEN (GREEN / 2 << 16 | RED)
#define GREEN_BLUE (BLUE << 16 | GREEN / 2)

/* Four pixels in a lane, at 12 bytes of the 16 that are read. */
WIDE static int64_t NAME(sum_grays)(const uint8_t *pixels, int64_t count)
{
    static const int8_t red_green[16] = {0, -1, 1, -1, 3, -1, 4, -1, 6, -1, 7, -1, 9, -1, 10, -1};
    static const int8_t green_blue[16] = {1, -1, 2, -1, 4, -1, 5, -1, 7, -1, 8, -1, 10, -1, 11, -1};
    const V first = SPREAD(red_green), second = SPREAD(green_blue);
    const V by_first = OP(set1_epi32)(RED_GREEN), by_second = OP(set1_epi32)(GREEN_BLUE);
    const int64_t step = 4 * LANES, most = INT64_C(1) << 20; /* of 255 each, in 32 bits */
    int64_t sum = 0, i = 0;
    while (i + step + 2 <= count) {
        V sums = ZERO;
        for (int64_t k = 0; k < most && i + step + 2 <= count; k++, i += step) {
            V four = LOAD_LANES(pixels + 3 * i, 12);
            V gray = OP(add_epi32)(OP(madd_epi16)(OP(shuffle_epi8)(four, first), by_first),
                                   OP(madd_epi16)(OP(shuffle_epi8)(four, second), by_second));
            sums = OP(add_epi32)(sums, OP(srli_epi32)(gray, 16));
        }
        uint32_t each[4 * LANES];
        STORE(each, sums);
        for (int k = 0; k < 4 * LANES; k++)
            sum += each[k];
    }
    return sum + sum_grays(pixels + 3 * i, count - i);
}

WIDE static inline V NAME(gray)(V red, V green, V blue)
{
    const V by_first = OP(set1_epi32)(RED_GREEN), by_second = OP(set1_epi32)(GREEN_BLUE);
    V low = OP(add_epi32)(OP(madd_epi16)(OP(unpacklo_epi16)(red, green), by_first),
                          OP(madd_epi16)(OP(unpacklo_epi16)(green, blue), by_second));
    V high = OP(add_epi32)(OP(madd_epi16)(OP(unpackhi_epi16)(red, green), by_first),
                           OP(madd_epi16)(OP(unpackhi_epi16)(green, blue), by_second));
    return OP(packus_epi32)(OP(srli_epi32)(low, 16), OP(srli_epi32)(high, 16));
}

/* Three vectors' bytes, of which each pick takes some. */
WIDE static inline V NAME(picked)(const V *from, const V *picks)
{
    return OR(OR(OP(shuffle_epi8)(from[0], picks[0]), OP(shuffle_epi8)(from[1], picks[1])),
              OP(shuffle_epi8)(from[2], picks[2]));
}

/* 16 pixels in the lanes of three vectors: color by color meanwhile. */
WIDE static void NAME(saturate)(uint8_t *pixels, int64_t count, int32_t factor)
{
    const V zero = ZERO, one = OP(set1_epi16)(1);
    const V high = OP(set1_epi16)((int16_t)(factor >> 16)), low = OP(set1_epi16)((int16_t)factor);
    const V gray_high = OP(set1_epi16)((int16_t)((ONE - factor) >> 16));
    const V gray_low = OP(set1_epi16)((int16_t)(ONE - factor));
    V apart[3][3], together[3][3];
    for (int vector = 0; vector < 3; vector++)
        for (int color = 0; color < 3; color++) {
            int8_t of_color[16], of_vector[16];
            for (int k = 0; k < 16; k++) {
                int at = 3 * k + color - 16 * vector, byte = 16 * vector + k;
                of_color[k] = (int8_t)(at >= 0 && at < 16 ? at : -1);
                of_vector[k] = (int8_t)(byte % 3 == color ? byte / 3 : -1);
            }
            apart[color][vector] = SPREAD(of_color);
            together[vector][color] = SPREAD(of_vector);
        }
    const int64_t step = 16 * LANES;
    int64_t i = 0;
    for (; i + step <= count; i += step, pixels += 3 * step) {
        V mixed[3], colors[3];
        for (int k = 0; k < 3; k++)
            mixed[k] = LOAD_LANES(pixels + 16 * k, 48);
        V half[2][3];
        for (int k = 0; k < 3; k++) {
            V bytes = NAME(picked)(mixed, apart[k]);
            half[0][k] = OP(unpacklo_epi8)(bytes, zero);
            half[1][k] = OP(unpackhi_epi8)(bytes, zero);
        }
        for (int h = 0; h < 2; h++) {
            V gray = NAME(gray)(half[h][0], half[h][1], half[h][2]);
            /* The gray's share less one 65536th, so that it is `less` + 1. */
            V share = OP(mullo_epi16)(gray, gray_low);
            V more = OP(add_epi16)(OP(mullo_epi16)(gray, gray_high),
                                   OP(mulhi_epu16)(gray, gray_low));
            V less = OP(sub_epi16)(share, one);
            more = OP(add_epi16)(more, OP(sub_epi16)(OP(min_epu16)(share, one), one));
            for (int k = 0; k < 3; k++) {
                V value = half[h][k];
                V carry = OP(srli_epi16)(OP(avg_epu16)(OP(mullo_epi16)(value, low), less), 15);
                V whole = OP(add_epi16)(OP(mullo_epi16)(value, high), more);
                half[h][k] = OP(add_epi16)(OP(add_epi16)(whole, OP(mulhi_epu16)(value, low)), carry);
            }
        }
        for (int k = 0; k < 3; k++)
            colors[k] = OP(packus_epi16)(half[0][k], half[1][k]);
        for (int k = 0; k < 3; k++)
            STORE_LANES(pixels + 16 * k, 48, NAME(picked)(colors, together[k]));
    }
    saturate(pixels, count - i, factor);
}

static const Colors NAME(colors) = {NAME(scale), NAME(sum_grays), NAME(saturate)};

/* Two rows of the source, of which the second weighs `weight` in 16384ths. */
WIDE static void NAME(between)(const uint8_t *upper, const uint8_t *lower, int32_t weight,
                               uint8_t *out, int64_t count)
{
    const V zero = ZERO, share = OP(set1_epi16)((int16_t)weight);
    for (int64_t i = 0; i < count; i += WIDTH) {
        i = i < count - WIDTH ? i : count - WIDTH; /* the last step does some again */
        V a = LOAD(upper + i), b = LOAD(lower + i), half[2];
        for (int k = 0; k < 2; k++) {
            V from = k ? OP(unpackhi_epi8)(a, zero) : OP(unpacklo_epi8)(a, zero);
            V to = k ? OP(unpackhi_epi8)(b, zero) : OP(unpacklo_epi8)(b, zero);
            V twice = OP(slli_epi16)(OP(sub_epi16)(to, from), 1);
            half[k] = OP(add_epi16)(from, OP(mulhrs_epi16)(twice, share));
        }
        STORE(out + i, OP(packus_epi16)(half[0], half[1]));
    }
}

/* Any number of rows of the source, two at a time. */
WIDE static void NAME(down)(const uint8_t *const *rows, const int16_t *weights, int64_t taps,
                            int precision, uint8_t *out, int64_t count)
{
    const V zero = ZERO, half = OP(set1_epi32)(precision ? 1 << (precision - 1) : 0);
    const __m128i places = _mm_cvtsi32_si128(precision);
    for (int64_t i = 0; i < count; i += WIDTH) {
        i = i < count - WIDTH ? i : count - WIDTH;
        V sums[4] = {half, half, half, half};
        for (int64_t k = 0; k < taps; k += 2) {
            const int last = k + 1 == taps;
            V by = OP(set1_epi32)((last ? 0 : (int32_t)weights[k + 1] * 65536) | weights[k]);
            V a = LOAD(rows[k] + i), b = LOAD(rows[last ? k : k + 1] + i);
            V low = OP(unpacklo_epi8)(a, b), high = OP(unpackhi_epi8)(a, b);
            V pairs[4] = {OP(unpacklo_epi8)(low, zero), OP(unpackhi_epi8)(low, zero),
                          OP(unpacklo_epi8)(high, zero), OP(unpackhi_epi8)(high, zero)};
            for (int part = 0; part < 4; part++)
                sums[part] = OP(add_epi32)(sums[part], OP(madd_epi16)(pairs[part], by));
        }
        for (int part = 0; part < 4; part++)
            sums[part] = OP(srl_epi32)(sums[part], places);
        STORE(out + i, OP(packus_epi16)(OP(packs_epi32)(sums[0], sums[1]),
                                        OP(packs_epi32)(sums[2], sums[3])));
    }
}
