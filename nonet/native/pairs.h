/* BF16 weights by the processor's own instruction for pairs of them (AVX512-BF16), where it has one.

   A float is taken as the sum of two bfloat16, high + low, which keeps 16 bits of it: two products then stand for one,
   and still take less time than making floats of the weights. Where `parts` is 1 it is rounded to one. Sums are in one
   order in every tile, as in products.h, but in another order than there. */

#ifndef NONET_PAIRS_H
#define NONET_PAIRS_H

#include "vector.h"

#define INLINE inline __attribute__((always_inline))

enum { LONG = 512 };

/* All rows of a panel by TAKE(rows, columns at a time), which sees r. Odd tiles (and, where registers are left over,
   broad ones) pass over the weights once for up to 8 rows: long rows gain by it, those shorter than LONG lose more by
   folding the sums of tiles that are not full. SIX: columns of the tile of six rows. */
#define BY_TILES(rows, odd, broad, SIX)                                                                                \
  for (I r = 0, left; (left = (rows) - r) > 0;) {                                                                      \
    if ((broad) && left >= 8) TAKE(8, 2), r += 8;                                                                      \
    else if ((broad) && left == 7) TAKE(7, 2), r += 7;                                                                 \
    else if ((broad) && left == 6) TAKE(6, SIX), r += 6;                                                               \
    else if ((odd) && left == 5) TAKE(5, 4), r += 5;                                                                   \
    else if (left >= 4) TAKE(4, 4), r += 4;                                                                            \
    else if ((odd) && left == 3) TAKE(3, 4), r += 3;                                                                   \
    else if (left >= 2) TAKE(2, 8), r += 2;                                                                            \
    else TAKE(1, 16), r += 1;                                                                                          \
  }

/* x[rows][K] split: rows of `width` numbers, the high parts of all rows, then the low parts, if there are two. */
typedef struct {
  const uint16_t *high, *low;
  I width;
} Split;

#if defined(__AVX512F__)
#include <immintrin.h>
#define WITH_PAIRS __attribute__((target("avx512bf16")))

static int has_pairs(void) { return __builtin_cpu_supports("avx512bf16"); }

static INLINE __m512 upper(__m256bh h) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
}

/* room: for 2 * rows * width numbers; width is K filled up to 32 with zeros. */
WITH_PAIRS static Split split(const int parts, const float *x, I rows, I K, uint16_t *room) {
  const I width = (K + 31) / 32 * 32;
  uint16_t *high = room, *low = room + rows * width;
  for (I r = 0; r < rows; r++)
    for (I k = 0; k < width; k += LANES) {
      const __m512 v = (__m512)at(x + r * K, k, K);
      const __m256bh h = _mm512_cvtneps_pbh(v), rest = _mm512_cvtneps_pbh(v - upper(h));
      memcpy(high + r * width + k, &h, sizeof h);
      if (parts == 2) memcpy(low + r * width + k, &rest, sizeof rest);
    }
  return (Split){high, low, width};
}

/* y[r][n] for RR rows from r on and 16 columns, whose weights are at w, NN of them at a time. */
WITH_PAIRS static INLINE void pair_panel(const int parts, const int RR, const int NN, const Split *x, I r,
                                         const char *w, I stride, float *y, I ys, I ahead) {
  const uint16_t *high = x->high + r * x->width, *low = x->low + r * x->width;
  for (int first = 0; first < 16; first += NN) {
    __m512 acc[32];
    V sums_of[32];
    float out[32];
    const char *v = w + first * stride;
#pragma GCC unroll 32
    for (int i = 0; i < (RR * NN + 15) / 16 * 16; i++) acc[i] = _mm512_setzero_ps();
    for (I k = 0; k < x->width; k += 32)
#pragma GCC unroll 16
      for (int n = 0; n < NN; n++) {
        const __m512bh weights = (__m512bh)_mm512_loadu_si512(v + n * stride + 2 * k);
        if (ahead) __builtin_prefetch(v + ahead + (k / 32 * NN + n) * 64, 0, 2);
#pragma GCC unroll 16
        for (int i = 0; i < RR; i++) {
          const I at = i * x->width + k;
          acc[i * NN + n] = _mm512_dpbf16_ps(acc[i * NN + n], weights, (__m512bh)_mm512_loadu_si512(high + at));
          if (parts == 1) continue;
          acc[i * NN + n] = _mm512_dpbf16_ps(acc[i * NN + n], weights, (__m512bh)_mm512_loadu_si512(low + at));
        }
      }
    memcpy(sums_of, acc, sizeof acc);
    store(out, sums(sums_of));
    if (RR * NN > 16) store(out + 16, sums(sums_of + 16));
    for (int i = 0; i < RR; i++) memcpy(y + (r + i) * ys + first, out + i * NN, NN * sizeof(float));
  }
}

/* y[r][n] = x[r] . w[n] for n in from..to */
WITH_PAIRS static INLINE void pair_columns(const int parts, Split x, I rows, const char *w, I stride, float *y, I ys,
                                           I from, I to) {
  const I ahead = 16 * stride;
  for (I n = from; n < to; n += 16) {
    if (n + 16 > to) {
      for (I r = 0; r < rows; r++)
        for (I c = n; c < to; c++) {
          __m512 acc = _mm512_setzero_ps();
          for (I k = 0; k < x.width; k += 32) {
            const __m512bh weights = (__m512bh)_mm512_loadu_si512(w + c * stride + 2 * k);
            acc = _mm512_dpbf16_ps(acc, weights, (__m512bh)_mm512_loadu_si512(x.high + r * x.width + k));
            if (parts == 1) continue;
            acc = _mm512_dpbf16_ps(acc, weights, (__m512bh)_mm512_loadu_si512(x.low + r * x.width + k));
          }
          y[r * ys + c] = sum((V)acc);
        }
      return;
    }
    const char *v = w + n * stride;
    const int odd = x.width >= LONG;
#define TAKE(RR, NN) pair_panel(parts, RR, NN, &x, r, v, stride, y + n, ys, r ? 0 : ahead)
    BY_TILES(rows, odd, odd && parts == 1, 4)
#undef TAKE
  }
}

WITH_PAIRS static void pair_product(int parts, Split x, I rows, const char *w, I stride, float *y, I ys, I from, I to) {
  if (parts == 1) pair_columns(1, x, rows, w, stride, y, ys, from, to);
  else pair_columns(2, x, rows, w, stride, y, ys, from, to);
}

#else

static int has_pairs(void) { return 0; }
static Split split(int parts, const float *x, I rows, I K, uint16_t *room) {
  (void)parts, (void)x, (void)rows, (void)K;
  return (Split){room, room, 0};
}
static void pair_product(int parts, Split x, I rows, const char *w, I stride, float *y, I ys, I from, I to) {
  (void)parts, (void)x, (void)rows, (void)w, (void)stride, (void)y, (void)ys, (void)from, (void)to;
}

#endif
#endif
