/* What the files of codecs share: reading bits, and in codec_functions.h the five functions of a codec.

   Peers compare hashes of what these write. So each operation has its own rounding, and all is compiled without fused
   multiply-add and without -ffast-math. The copies for wider registers have the same operations in the same order: only
   sums of integers, and the norms, which need no equal bits, are added up in another order.

   Little-endian, like all machines we run on. */

#ifndef BARNRAISE_CODEC_H
#define BARNRAISE_CODEC_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { ROW = 4096, REFUSED = 0x8000 }; /* REFUSED: the bit of `bad` that says so; the others mean nothing */

INLINE uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE int64_t shorter(int64_t a, int64_t b) { return a < b ? a : b; }

#endif
