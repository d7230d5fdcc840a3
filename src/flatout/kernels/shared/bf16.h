/* bfloat16 and float: the upper half of its bits, rounded to the nearest, ties to even. */

#ifndef FLATOUT_BF16_H
#define FLATOUT_BF16_H

#include <stdint.h>
#include <string.h>

static inline uint16_t rounded(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t nearest = (uint16_t)((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16);
    return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : nearest;
}

static inline float widened(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

#endif
