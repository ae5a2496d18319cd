/* Products with float32 weights that lie by panels of 16 columns: [panels][K][16], the last one filled up with zeros.

   A vector holds sums of neighbouring columns, and each number of a row multiplies vectors of weights: nothing is
   folded. Every element is summed in the order of k, so neither the other rows, nor the tile it falls into, nor the
   number of threads has a say. */

#ifndef NONET_PANELS_H
#define NONET_PANELS_H

#include "pairs.h"
#include "vector.h"

/* REGISTER: bytes of a register of the level compiled for. Tiles are up to TALL rows by WIDE panels, whose sums and
   weights fill the registers. FEW rows wait for memory and for their own additions: they take BROAD panels at once. */
#if defined(__AVX512F__)
enum { REGISTER = 64, TALL = 8, WIDE = 2, FEW = 3, BROAD = 4 };
#elif defined(__AVX__)
enum { REGISTER = 32, TALL = 6, WIDE = 1, FEW = 1, BROAD = 4 };
#else
enum { REGISTER = 16, TALL = 2, WIDE = 1, FEW = 1, BROAD = 2 };
#endif
enum { PANEL = LANES, PARTS = 64 / REGISTER, MOST_SUMS = 16 };

typedef float Part __attribute__((vector_size(REGISTER), aligned(4), may_alias)); /* a PARTS-th of a panel */

static INLINE I panels(I N) { return (N + PANEL - 1) / PANEL; }

/* y[r][n] of RR rows and PP panels, whose weights are at w; columns from `to` on are left out. ahead: how many floats
   further weights are asked for, because memory is what few rows wait for; 0: nothing. */
static INLINE void panel_tile(const int RR, const int PP, const float *x, I xs, const float *w, I K, float *y, I ys,
                              I n, I to, I ahead) {
  const int NN = PP * PARTS;
  Part acc[MOST_SUMS], weights[BROAD * PARTS];
#pragma GCC unroll 16
  for (int i = 0; i < RR * NN; i++) acc[i] = (Part){0};
  for (I k = 0; k < K; k++) {
#pragma GCC unroll 8
    for (int i = 0; i < NN; i++) weights[i] = ((const Part *)(w + (i / PARTS * K + k) * PANEL))[i % PARTS];
#pragma GCC unroll 4
    for (int p = 0; p < PP; p++) /* in order of memory, line by line */
      if (ahead) __builtin_prefetch(w + (k * PP + p) * PANEL + ahead, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < RR; r++)
#pragma GCC unroll 8
      for (int i = 0; i < NN; i++) acc[r * NN + i] += x[r * xs + k] * weights[i];
  }
  const int whole = n + PP * PANEL <= to;
  float out[TALL * BROAD * PANEL];
#pragma GCC unroll 16
  for (int i = 0; i < RR * NN; i++)
    ((Part *)(whole ? y + i / NN * ys + n : out + i / NN * PP * PANEL))[i % NN] = acc[i];
  for (int r = 0; !whole && r < RR; r++) memcpy(y + r * ys + n, out + r * PP * PANEL, (to - n) * sizeof(float));
}

/* y[r][n] of all rows and PP panels, in tiles of at most `most` rows, as equal as can be. */
static INLINE void panel_rows(const int PP, const int most, const float *x, I xs, I rows, const float *w, I K, float *y,
                              I ys, I n, I to) {
  const I tiles = (rows + most - 1) / most;
  for (I i = 0, r = 0, end; i < tiles; i++, r = end) {
    end = rows * (i + 1) / tiles;
    switch (end - r) {
#define TAKE(RR)                                                                                                       \
  case RR:                                                                                                             \
    if (RR <= most) panel_tile(RR, PP, x + r * xs, xs, w, K, y + r * ys, ys, n, to, r ? 0 : PP * K * PANEL);           \
    break;
      TAKE(1) TAKE(2) TAKE(3) TAKE(4) TAKE(5) TAKE(6) TAKE(7) TAKE(8)
#undef TAKE
    }
  }
}

/* y[r][n] = x[r] . w[n] for n in from..to, where `from` begins a panel; rows of x and y are xs and ys apart. */
static void panel_product(const float *x, I xs, I rows, const float *w, I K, float *y, I ys, I from, I to) {
  I n = from;
#define STRIPS(PP, MOST)                                                                                               \
  for (; n + (PP - 1) * PANEL < to; n += PP * PANEL) panel_rows(PP, MOST, x, xs, rows, w + n * K, K, y, ys, n, to);
  if (rows <= FEW) STRIPS(BROAD, FEW)
  STRIPS(WIDE, TALL)
  STRIPS(1, TALL)
#undef STRIPS
}

#endif
