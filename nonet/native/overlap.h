/* The products of overlap.c on tiles that fit the registers, and its vectors of 16 doubles, in which long sums run. */

#ifndef NONET_OVERLAP_H
#define NONET_OVERLAP_H

#include "vector.h"

#define INLINE inline __attribute__((always_inline))

/* A register tile: OUT_ROWS x OUT_VECTORS sums, or BROAD x 1; as many of either. */
#if defined(__AVX512F__)
enum { OUT_ROWS = 8, OUT_VECTORS = 3 };
#elif defined(__AVX__)
enum { OUT_ROWS = 6, OUT_VECTORS = 1 };
#else
enum { OUT_ROWS = 3, OUT_VECTORS = 1 };
#endif
enum { BROAD = OUT_ROWS * OUT_VECTORS };
enum { TOKENS = 48 }; /* worked on together: a whole number of every tile's rows */

typedef double W __attribute__((vector_size(128), aligned(8)));

static INLINE W wide(V v) { return __builtin_convertvector(v, W); }
static INLINE V larger(V a, V b) { return pick(a > b, a, b); }
static INLINE V smaller(V a, V b) { return pick(a < b, a, b); }
/* e^x, and 0 below e^-70: what follows multiplies it, and products below 1e-38 cost a hundred times a normal one. */
static INLINE V expo(V x) { return pick(x < -70.0f, splat(0), vexp(x)); }

/* Sums over tokens: min(p, q) and, of those with q < p, q, both over e^top; of the same, p - q; p; p (log p - log q).
   Of few tokens in floats, of all in doubles. */
typedef struct {
  V both, short_, missing, mass, divergence;
} Few;
typedef struct {
  W both, short_, missing, mass, divergence;
} Sums;

/* scale: e^top */
static INLINE void count(Few *s, V log_p, V log_q, V top, V scale) {
  V p = expo(log_p), least = expo(smaller(log_p, log_q) - top);
  VI in_S = log_q < log_p;
  s->both += least;
  s->short_ += pick(in_S, least, splat(0));
  s->missing += pick(in_S, p - least * scale, splat(0));
  s->mass += p;
  s->divergence += p * (log_p - log_q);
}

static INLINE void join(Sums *s, const Sums *o) {
  s->both += o->both;
  s->short_ += o->short_;
  s->missing += o->missing;
  s->mass += o->mass;
  s->divergence += o->divergence;
}

static INLINE Sums widened(const Few *s) {
  return (Sums){wide(s->both), wide(s->short_), wide(s->missing), wide(s->mass), wide(s->divergence)};
}

static void *scratch(I floats) { return aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64); }

/* Where thread t's part of n tokens begins; parts are whole tiles, but for the last. */
static I part(I n, I t, I threads) {
  I at = (n + TOKENS - 1) / TOKENS * t / threads * TOKENS;
  return at < n ? at : n;
}

/* out[D][16] = scale h[rows][D]^T, zeros where there is no row. */
static void turned(const float *h, I rows, I D, float scale, float *out) {
  for (I d = 0; d < D; d++)
    for (I r = 0; r < LANES; r++) out[d * LANES + r] = r < rows ? scale * h[r * D + d] : 0;
}

/* Ask for BROAD floats at p, which are for the next 48 tokens: with each step of a tile's sum as many as the tile has
   sums, the 48 tokens' rows of the head, or of its gradient, are all asked for while these 48 are worked on. */
static INLINE void fetch_ahead(const float *p) {
#pragma GCC unroll 2
  for (int i = 0; i < BROAD; i += LANES / 4 * 3) __builtin_prefetch(p + i, 0, 2);
}

/* acc[m * NN + n] = sum over k < K of a[m am + k ak] b[k][16 n ..], rows of b bs apart; `left` floats in the last. */
static INLINE void outer(const int MM, const int NN, const float *a, I am, I ak, const float *b, I bs, I K, I left,
                         V *acc, const float *ahead) {
#pragma GCC unroll 32
  for (int i = 0; i < MM * NN; i++) acc[i] = (V){0};
  for (I k = 0; k < K; k++, a += ak, b += bs, ahead += BROAD) {
    V row[OUT_VECTORS];
    fetch_ahead(ahead);
#pragma GCC unroll 4
    for (int n = 0; n < NN; n++) row[n] = left < LANES ? at(b, 0, left) : load(b + n * LANES);
#pragma GCC unroll 32
    for (int m = 0; m < MM; m++)
#pragma GCC unroll 4
      for (int n = 0; n < NN; n++) acc[m * NN + n] += a[m * am] * row[n];
  }
}

/* z[n][16] = w[n][D] h[D][16] */
static INLINE void logits(const float *w, const float *h, I D, I n, float *z) {
  V acc[BROAD];
  I i = 0;
  for (; i + BROAD <= n; i += BROAD) {
    outer(BROAD, 1, w + i * D, D, 1, h, LANES, D, LANES, acc, w + (i + BROAD) * D);
    for (int m = 0; m < BROAD; m++) store(z + (i + m) * LANES, acc[m]);
  }
  for (; i < n; i++) {
    outer(1, 1, w + i * D, D, 1, h, LANES, D, LANES, acc, w + i * D);
    store(z + i * LANES, acc[0]);
  }
}

/* MM rows of `add_product`. */
static INLINE void add_rows(const int MM, const float *a, I am, I ak, const float *b, I K, I D, float *out,
                            const float *ahead) {
  V acc[OUT_ROWS * OUT_VECTORS];
  I j = 0;
  for (; j + OUT_VECTORS * LANES <= D; j += OUT_VECTORS * LANES, ahead += K * BROAD) {
    outer(MM, OUT_VECTORS, a, am, ak, b + j, D, K, LANES, acc, ahead);
    for (int m = 0; m < MM; m++)
      for (int n = 0; n < OUT_VECTORS; n++) {
        float *p = out + m * D + j + n * LANES;
        store(p, load(p) + acc[m * OUT_VECTORS + n]);
      }
  }
  for (; j < D; j += LANES) {
    I left = D - j < LANES ? D - j : LANES;
    outer(MM, 1, a, am, ak, b + j, D, K, left, acc, ahead);
    for (int m = 0; m < MM; m++) put(out + m * D + j, 0, left, at(out + m * D + j, 0, left) + acc[m]);
  }
}

/* out[M][D] += a b, with a[m][k] at a[m am + k ak] and b [K][D]; asks for what lies at `ahead`. */
static INLINE void add_product(const float *a, I am, I ak, I M, const float *b, I K, I D, float *out,
                               const float *ahead) {
  I m = 0;
  for (; m + OUT_ROWS <= M; m += OUT_ROWS, ahead += K * D / OUT_VECTORS / LANES * BROAD)
    add_rows(OUT_ROWS, a + m * am, am, ak, b, K, D, out + m * D, ahead);
  for (; m < M; m++) add_rows(1, a + m * am, am, ak, b, K, D, out + m * D, ahead);
}

#endif
