/* What color.h and resample.h do, by vectors of 32 bytes, with the same bytes as
   results.

   Unpacking bytes and packing them again stays within a lane, so the order is kept. Products of a
   byte and a number of 65536ths are taken apart: `high` holds its whole part, which is signed, and
   `low` the 16 bits behind the point. `avg(a, b)` is (a + b + 1) >> 1 without an overflow, so
   avg(a, b) >> 15 is what a sum of a and b + 1 carries. */

/* value * factor + shift. */
AVX2 static void scale_avx2(uint8_t *values, int64_t count, int32_t factor, int32_t shift)
{
    const __m256i zero = _mm256_setzero_si256(), high = _mm256_set1_epi16((int16_t)(factor >> 16));
    const __m256i low = _mm256_set1_epi16((int16_t)factor);
    const __m256i more = _mm256_set1_epi16((int16_t)((shift - 1) >> 16));
    const __m256i less = _mm256_set1_epi16((int16_t)(shift - 1));
    int64_t i = 0;
    for (; i + 32 <= count; i += 32) {
        __m256i bytes = load_32(values + i), half[2];
        half[0] = _mm256_unpacklo_epi8(bytes, zero), half[1] = _mm256_unpackhi_epi8(bytes, zero);
        for (int k = 0; k < 2; k++) {
            __m256i sum = _mm256_avg_epu16(_mm256_mullo_epi16(half[k], low), less);
            __m256i carry = _mm256_srli_epi16(sum, 15);
            __m256i whole = _mm256_add_epi16(_mm256_mullo_epi16(half[k], high), more);
            whole = _mm256_add_epi16(whole, _mm256_mulhi_epu16(half[k], low));
            half[k] = _mm256_add_epi16(whole, carry);
        }
        store_32(values + i, _mm256_packus_epi16(half[0], half[1]));
    }
    scale(values + i, count - i, factor, shift);
}

/* A green of 38470 is no int16: it is taken in two halves, beside the red and beside the blue. */
#define RED_GREEN (GREEN / 2 << 16 | RED)
#define GREEN_BLUE (BLUE << 16 | GREEN / 2)

/* Four pixels in a lane, at 12 bytes of the 16 that are read. */
AVX2 static int64_t sum_grays_avx2(const uint8_t *pixels, int64_t count)
{
    static const int8_t red_green[16] = {0, -1, 1, -1, 3, -1, 4, -1, 6, -1, 7, -1, 9, -1, 10, -1};
    static const int8_t green_blue[16] = {1, -1, 2, -1, 4, -1, 5, -1, 7, -1, 8, -1, 10, -1, 11, -1};
    const __m256i first = spread_16(red_green), second = spread_16(green_blue);
    const __m256i by_first = _mm256_set1_epi32(RED_GREEN);
    const __m256i by_second = _mm256_set1_epi32(GREEN_BLUE);
    const int64_t step = 8, most = INT64_C(1) << 20; /* of 255 each, in 32 bits */
    int64_t sum = 0, i = 0;
    while (i + step + 2 <= count) {
        __m256i sums = _mm256_setzero_si256();
        for (int64_t k = 0; k < most && i + step + 2 <= count; k++, i += step) {
            __m256i four = load_lanes(pixels + 3 * i, 12);
            __m256i red = _mm256_madd_epi16(_mm256_shuffle_epi8(four, first), by_first);
            __m256i blue = _mm256_madd_epi16(_mm256_shuffle_epi8(four, second), by_second);
            __m256i gray = _mm256_add_epi32(red, blue);
            sums = _mm256_add_epi32(sums, _mm256_srli_epi32(gray, 16));
        }
        uint32_t each[8];
        store_32(each, sums);
        for (int k = 0; k < 8; k++)
            sum += each[k];
    }
    return sum + sum_grays(pixels + 3 * i, count - i);
}

AVX2 static inline __m256i gray_avx2(__m256i red, __m256i green, __m256i blue)
{
    const __m256i by_first = _mm256_set1_epi32(RED_GREEN);
    const __m256i by_second = _mm256_set1_epi32(GREEN_BLUE);
    __m256i low = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpacklo_epi16(red, green), by_first),
                          _mm256_madd_epi16(_mm256_unpacklo_epi16(green, blue), by_second));
    __m256i high = _mm256_add_epi32(_mm256_madd_epi16(_mm256_unpackhi_epi16(red, green), by_first),
                           _mm256_madd_epi16(_mm256_unpackhi_epi16(green, blue), by_second));
    return _mm256_packus_epi32(_mm256_srli_epi32(low, 16), _mm256_srli_epi32(high, 16));
}

/* Three vectors' bytes, of which each pick takes some. */
AVX2 static inline __m256i picked_avx2(const __m256i *from, const __m256i *picks)
{
    __m256i two = _mm256_or_si256(_mm256_shuffle_epi8(from[0], picks[0]),
                                  _mm256_shuffle_epi8(from[1], picks[1]));
    return _mm256_or_si256(two, _mm256_shuffle_epi8(from[2], picks[2]));
}

/* 16 pixels in the lanes of three vectors: color by color meanwhile. */
AVX2 static void saturate_avx2(uint8_t *pixels, int64_t count, int32_t factor)
{
    const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi16(1);
    const __m256i high = _mm256_set1_epi16((int16_t)(factor >> 16));
    const __m256i low = _mm256_set1_epi16((int16_t)factor);
    const __m256i gray_high = _mm256_set1_epi16((int16_t)((ONE - factor) >> 16));
    const __m256i gray_low = _mm256_set1_epi16((int16_t)(ONE - factor));
    __m256i apart[3][3], together[3][3];
    for (int vector = 0; vector < 3; vector++)
        for (int color = 0; color < 3; color++) {
            int8_t of_color[16], of_vector[16];
            for (int k = 0; k < 16; k++) {
                int at = 3 * k + color - 16 * vector, byte = 16 * vector + k;
                of_color[k] = (int8_t)(at >= 0 && at < 16 ? at : -1);
                of_vector[k] = (int8_t)(byte % 3 == color ? byte / 3 : -1);
            }
            apart[color][vector] = spread_16(of_color);
            together[vector][color] = spread_16(of_vector);
        }
    const int64_t step = 16 * 2;
    int64_t i = 0;
    for (; i + step <= count; i += step, pixels += 3 * step) {
        __m256i mixed[3], colors[3];
        for (int k = 0; k < 3; k++)
            mixed[k] = load_lanes(pixels + 16 * k, 48);
        __m256i half[2][3];
        for (int k = 0; k < 3; k++) {
            __m256i bytes = picked_avx2(mixed, apart[k]);
            half[0][k] = _mm256_unpacklo_epi8(bytes, zero);
            half[1][k] = _mm256_unpackhi_epi8(bytes, zero);
        }
        for (int h = 0; h < 2; h++) {
            __m256i gray = gray_avx2(half[h][0], half[h][1], half[h][2]);
            /* The gray's share less one 65536th, so that it is `less` + 1. */
            __m256i share = _mm256_mullo_epi16(gray, gray_low);
            __m256i more = _mm256_add_epi16(_mm256_mullo_epi16(gray, gray_high),
                                   _mm256_mulhi_epu16(gray, gray_low));
            __m256i less = _mm256_sub_epi16(share, one);
            more = _mm256_add_epi16(more, _mm256_sub_epi16(_mm256_min_epu16(share, one), one));
            for (int k = 0; k < 3; k++) {
                __m256i value = half[h][k];
                __m256i sum = _mm256_avg_epu16(_mm256_mullo_epi16(value, low), less);
                __m256i carry = _mm256_srli_epi16(sum, 15);
                __m256i whole = _mm256_add_epi16(_mm256_mullo_epi16(value, high), more);
                whole = _mm256_add_epi16(whole, _mm256_mulhi_epu16(value, low));
                half[h][k] = _mm256_add_epi16(whole, carry);
            }
        }
        for (int k = 0; k < 3; k++)
            colors[k] = _mm256_packus_epi16(half[0][k], half[1][k]);
        for (int k = 0; k < 3; k++)
            store_lanes(pixels + 16 * k, 48, picked_avx2(colors, together[k]));
    }
    saturate(pixels, count - i, factor);
}

static const Colors colors_avx2 = {scale_avx2, sum_grays_avx2, saturate_avx2};

/* Two rows of the source, of which the second weighs `weight` in 16384ths. */
AVX2 static void between_avx2(const uint8_t *upper, const uint8_t *lower, int32_t weight,
                               uint8_t *out, int64_t count)
{
    const __m256i zero = _mm256_setzero_si256(), share = _mm256_set1_epi16((int16_t)weight);
    for (int64_t i = 0; i < count; i += 32) {
        i = i < count - 32 ? i : count - 32; /* the last step does some again */
        __m256i a = load_32(upper + i), b = load_32(lower + i), half[2];
        for (int k = 0; k < 2; k++) {
            __m256i from = k ? _mm256_unpackhi_epi8(a, zero) : _mm256_unpacklo_epi8(a, zero);
            __m256i to = k ? _mm256_unpackhi_epi8(b, zero) : _mm256_unpacklo_epi8(b, zero);
            __m256i twice = _mm256_slli_epi16(_mm256_sub_epi16(to, from), 1);
            half[k] = _mm256_add_epi16(from, _mm256_mulhrs_epi16(twice, share));
        }
        store_32(out + i, _mm256_packus_epi16(half[0], half[1]));
    }
}

/* Any number of rows of the source, two at a time. */
AVX2 static void down_avx2(const uint8_t *const *rows, const int16_t *weights, int64_t taps,
                            int precision, uint8_t *out, int64_t count)
{
    const __m256i zero = _mm256_setzero_si256();
    const __m256i half = _mm256_set1_epi32(precision ? 1 << (precision - 1) : 0);
    const __m128i places = _mm_cvtsi32_si128(precision);
    for (int64_t i = 0; i < count; i += 32) {
        i = i < count - 32 ? i : count - 32;
        __m256i sums[4] = {half, half, half, half};
        for (int64_t k = 0; k < taps; k += 2) {
            const int last = k + 1 == taps;
            const int32_t next = last ? 0 : (int32_t)weights[k + 1] * 65536;
            __m256i by = _mm256_set1_epi32(next | weights[k]);
            __m256i a = load_32(rows[k] + i), b = load_32(rows[last ? k : k + 1] + i);
            __m256i low = _mm256_unpacklo_epi8(a, b), high = _mm256_unpackhi_epi8(a, b);
            __m256i pairs[4] = {_mm256_unpacklo_epi8(low, zero), _mm256_unpackhi_epi8(low, zero),
                          _mm256_unpacklo_epi8(high, zero), _mm256_unpackhi_epi8(high, zero)};
            for (int part = 0; part < 4; part++)
                sums[part] = _mm256_add_epi32(sums[part], _mm256_madd_epi16(pairs[part], by));
        }
        for (int part = 0; part < 4; part++)
            sums[part] = _mm256_srl_epi32(sums[part], places);
        store_32(out + i, _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]),
                                        _mm256_packs_epi32(sums[2], sums[3])));
    }
}
