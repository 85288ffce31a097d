/* The codecs fp32, fp16 and bf16: what optim/codecs/floats.py computes, to the bit. A value at a time, rounded to the
   nearest and of two to the even one. What is infinite or not a number once it is encoded is refused.

   Integers do it: instructions for it are not on every CPU, and these need no more time than memory does. */

#include "codec.h"

INLINE double sum_of_squares(const float *values, int64_t m)
{
    enum { LANES = 16 }; /* sums side by side, as the compiler may not change the order of one */
    double sums[LANES] = {0.0}, total = 0.0;
    int64_t i = 0;
    for (; i + LANES <= m; i += LANES)
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] += (double)values[i + lane] * (double)values[i + lane];
    for (; i < m; i++)
        total += (double)values[i] * (double)values[i];
    for (int lane = 0; lane < LANES; lane++)
        total += sums[lane];
    return total;
}

/* Whether a magnitude is refused is carried into the bit REFUSED: its 15 bits plus one unit of its exponent. */

INLINE float fp16_widen(uint16_t half, uint32_t *bad)
{
    uint32_t magnitude = half & 0x7fff, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t subnormal = (uint32_t)((int32_t)(magnitude - 0x400) >> 31); /* a mask: "?:" would be a branch */
    /* The exponent's bias is 15 there, 127 here. A subnormal number has no leading one: it gets one, which is taken off. */
    uint32_t widened = (magnitude << 13) + (112 << 23) + (subnormal & 1 << 23);
    float value = float_of(widened) - float_of(subnormal & 113 << 23);
    *bad |= magnitude + 0x400;
    return float_of(bits_of(value) | sign);
}

INLINE uint16_t fp16_narrow(float x, uint32_t *bad)
{
    uint32_t magnitude = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
    int32_t exponent = (int32_t)(magnitude & 0x7f800000);
    exponent = exponent > 113 << 23 ? exponent : 113 << 23; /* of 2^-14: below, all have the same last bit */
    uint32_t rounder = (uint32_t)exponent + (13 << 23);     /* its last bit is that of the result: adding it rounds */
    uint32_t mantissa = bits_of(float_of(magnitude) + float_of(rounder)) - rounder; /* with its leading one */
    uint32_t rounded = ((uint32_t)(exponent - (113 << 23)) >> 13) + mantissa;
    *bad |= (magnitude + (0x80000000 - 0x477ff000)) >> 16; /* 65520 would round to infinity */
    return (uint16_t)(rounded | sign);
}

INLINE float bf16_widen(uint16_t high, uint32_t *bad)
{
    *bad |= (high & 0x7fff) + 0x80;
    return float_of((uint32_t)high << 16);
}

INLINE uint16_t bf16_narrow(float x, uint32_t *bad)
{
    uint32_t magnitude = bits_of(x) & 0x7fffffff, sign = bits_of(x) >> 16 & 0x8000;
    uint32_t rounded = (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16;
    *bad |= rounded + 0x80;
    return (uint16_t)(rounded | sign);
}

INLINE float fp32_widen(float x, uint32_t *bad)
{
    *bad |= (bits_of(x) >> 16 & 0x7fff) + 0x80;
    return x;
}

INLINE float fp32_narrow(float x, uint32_t *bad) { return fp32_widen(x, bad); }

#define CAST(codec, type)                                                                                              \
    enum { codec##_ROW_BYTES = ROW * sizeof(type), codec##_RUN = ROW };                                                \
                                                                                                                       \
    typedef const uint8_t *codec##_Run;                                                                                \
                                                                                                                       \
    INLINE codec##_Run codec##_run(const uint8_t *row, int64_t m, int64_t at, uint32_t *bad)                           \
    {                                                                                                                  \
        (void)m, (void)bad;                                                                                            \
        return row + at * (int64_t)sizeof(type);                                                                       \
    }                                                                                                                  \
                                                                                                                       \
    INLINE float codec##_value(codec##_Run run, int64_t i, uint32_t *bad)                                              \
    {                                                                                                                  \
        type value; /* at any address */                                                                               \
        memcpy(&value, run + i * (int64_t)sizeof value, sizeof value);                                                 \
        return codec##_widen(value, bad);                                                                              \
    }                                                                                                                  \
                                                                                                                       \
    INLINE void codec##_encode_row(const float *restrict x, int64_t m, uint8_t *restrict row, uint32_t *bad)           \
    {                                                                                                                  \
        uint32_t refused = 0;                                                                                          \
        for (int64_t i = 0; i < m; i++) {                                                                              \
            type value = codec##_narrow(x[i], &refused); /* what is checked is what is written */                      \
            memcpy(row + i * (int64_t)sizeof value, &value, sizeof value);                                             \
        }                                                                                                              \
        *bad |= refused;                                                                                               \
    }                                                                                                                  \
                                                                                                                       \
    INLINE double codec##_row_sqnorm(const uint8_t *row, int64_t m, uint32_t *bad)                                     \
    {                                                                                                                  \
        float values[ROW];                                                                                             \
        uint32_t refused = 0;                                                                                          \
        for (int64_t i = 0; i < m; i++)                                                                                \
            values[i] = codec##_value(row, i, &refused);                                                               \
        *bad |= refused;                                                                                               \
        return sum_of_squares(values, m);                                                                              \
    }

CAST(fp16, uint16_t)
CAST(bf16, uint16_t)
CAST(fp32, float)

#define CODEC fp16
#include "codec_functions.h"
#define CODEC bf16
#include "codec_functions.h"
#define CODEC fp32
#include "codec_functions.h"
