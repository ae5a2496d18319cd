/* Products of rows of floats with matrices of weights in one of five formats, split over a team of threads.

   Every element of a product is summed in one fixed order: lane i of a vector takes k = i, i + 16, ..., then the lanes
   are folded; panels.h, which float32 weights go to, has another. Neither the other rows, nor the tile it falls into,
   nor the number of threads has a say. */

#ifndef NONET_PRODUCTS_H
#define NONET_PRODUCTS_H

#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#include "pairs.h"
#include "panels.h"
#include "vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* --------------------------------------------------------------------- team */

/* Where a team waits for its last: how many have come, how many times all have, and how many times somebody waited so
   long that a thread must have been without a core. */
typedef struct {
  _Alignas(64) atomic_long come;
  _Alignas(64) atomic_long rounds;
  _Alignas(64) atomic_long stalls;
} Gate;

/* Threads that carry the same rows through the model; alone where size is 1. room: this thread's, for a product's rows
   split (pairs.h). */
typedef struct {
  I rank, size;
  Gate *gate;
  uint16_t *room;
} Team;

/* Looks before a waiting thread gives its core away (some tens of microseconds); seconds that count as a stall. */
enum { PATIENCE = 1 << 12 };
static const double STALL = 1e-3;

static double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Nobody goes on before all have come. Who waits long gives its core away: the one waited for may need it. */
static void meet(const Team *t) {
  if (t->size == 1) return;
  const long round = atomic_load(&t->gate->rounds);
  if (atomic_fetch_add(&t->gate->come, 1) + 1 == t->size) {
    atomic_store(&t->gate->come, 0);
    atomic_store(&t->gate->rounds, round + 1);
    return;
  }
  for (int looks = 0; looks < PATIENCE; looks++) {
    if (atomic_load(&t->gate->rounds) != round) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const double began = seconds();
  while (atomic_load(&t->gate->rounds) == round) sched_yield();
  if (seconds() - began > STALL) atomic_fetch_add(&t->gate->stalls, 1);
}

/* from..to: this thread's part of n things, in whole grains. */
static void share(const Team *t, I n, I grain, I *from, I *to) {
  I grains = (n + grain - 1) / grain;
  *from = grains * t->rank / t->size * grain;
  *to = grains * (t->rank + 1) / t->size * grain;
  if (*from > n) *from = n;
  if (*to > n) *to = n;
}

/* ------------------------------------------------------------------ formats */

enum { FLOAT32 = 0, BF16 = 1, INT8 = 2, MXFP4 = 3, W16A16 = 4, GROUP = 32 };

/* [N][K], copied (model/native_weights.py). FLOAT32 lies by panels (panels.h), as a Matrix; `product` reads rows of it
   where they are. The others: all rows one after another, each filled up with zeros to whole groups of 32, then the
   scales.

     BF16    the upper halves of floats
     W16A16  the same; rows are rounded to it as well, where the processor multiplies pairs (pairs.h), and half the work
     INT8    bytes; then a float a row
     MXFP4   16 bytes a group, byte i holding code i below and code i + 16 above; then a biased exponent a group */
typedef struct {
  const void *at;
  const float *bias;
  I format, N, K;
} Matrix;

static INLINE I groups(I K) { return (K + GROUP - 1) / GROUP; }

/* Whether rows are split into bfloat16 before they are multiplied. */
static INLINE int halved(const I format) { return format == BF16 || format == W16A16; }

static INLINE I row_bytes(const I format, I K) {
  if (format == FLOAT32) return 4 * K;
  return groups(K) * (halved(format) ? 64 : format == INT8 ? 32 : 16);
}

static INLINE I matrix_bytes(const I format, I N, I K) {
  if (format == FLOAT32) return panels(N) * PANEL * 4 * K;
  return N * (row_bytes(format, K) + (format == INT8 ? 4 : format == MXFP4 ? groups(K) : 0));
}

/* Matrix number e of a stack of equal ones. */
static Matrix nth(Matrix w, I e) {
  w.at = (const char *)w.at + e * matrix_bytes(w.format, w.N, w.K);
  return w;
}

typedef uint16_t Halves __attribute__((vector_size(32), aligned(2)));

static INLINE V halves(const char *p) {
  Halves h;
  memcpy(&h, p, sizeof h);
  return (V)(__builtin_convertvector(h, VI) << 16);
}

/* 16 bytes as integers. GCC 12 takes __builtin_convertvector apart here, byte by byte. */
static INLINE VI bytes(const char *p) {
#if defined(__AVX512F__)
  return (VI)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
  union {
    __m256i half[2];
    VI whole;
  } u = {{_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p + 8)))}};
  return u.whole;
#else
  VI v;
  for (int i = 0; i < LANES; i++) v[i] = (int8_t)p[i];
  return v;
#endif
}

/* The sixteen values of E2M1 by code, times a scale: looked up by the low four bits of each lane. */
static INLINE V grid(uint8_t exponent) {
  const V codes = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
  uint32_t u = exponent ? (uint32_t)exponent << 23 : 1u << 22; /* 2^-127 is below the normal floats */
  float scale;
  memcpy(&scale, &u, sizeof scale);
  return codes * scale;
}

/* Weights 16 half .. 16 half + 15 of the group at p; INT8 without its row's scale. */
static INLINE V weights(const I format, const char *p, const int half, V values) {
  if (format == FLOAT32) return load((const float *)p + 16 * half);
  if (format == BF16) return halves(p + 32 * half);
  if (format == INT8) return __builtin_convertvector(bytes(p + 16 * half), V);
  return __builtin_shuffle(values, half ? bytes(p) >> 4 : bytes(p));
}

/* ----------------------------------------------------------------- products */

/* acc[r * NN + n] = x[r] . w[n] over K, as vectors still to be folded. exponents: of the first row, MXFP4 only.
   ahead: how many bytes further weights are asked for, because memory is what few rows wait for; 0: nothing. */
static INLINE void tile(const I format, const int RR, const int NN, const float *x, I xs, const char *w, I stride,
                        const uint8_t *exponents, I K, V *acc, I ahead) {
  const I bytes_a_group = row_bytes(format, GROUP), G = groups(K);
#pragma GCC unroll 32
  for (int i = 0; i < RR * NN; i++) acc[i] = (V){0};
  I k = 0;
  for (; k + GROUP <= K; k += GROUP)
#pragma GCC unroll 16
    for (int n = 0; n < NN; n++) {
      const char *p = w + n * stride + k / GROUP * bytes_a_group;
      V values = format == MXFP4 ? grid(exponents[n * G + k / GROUP]) : splat(0);
      V low = weights(format, p, 0, values), high = weights(format, p, 1, values);
      const char *soon = w + ahead + (k / GROUP * NN + n) * bytes_a_group; /* in order of memory, line by line */
      if (ahead && n * bytes_a_group % 64 == 0) __builtin_prefetch(soon, 0, 2);
      if (ahead && format == FLOAT32) __builtin_prefetch(soon + 64, 0, 2);
#pragma GCC unroll 16
      for (int r = 0; r < RR; r++) {
        acc[r * NN + n] += load(x + r * xs + k) * low;
        acc[r * NN + n] += load(x + r * xs + k + LANES) * high;
      }
    }
  for (I first = k; k < K; k += LANES)
    for (int n = 0; n < NN; n++) {
      const char *p = w + n * stride + first / GROUP * bytes_a_group;
      V values = format == MXFP4 ? grid(exponents[n * G + G - 1]) : splat(0);
      V rest = format == FLOAT32 ? at((const float *)p, k - first, K - first)
               : k == first      ? weights(format, p, 0, values)
                                 : weights(format, p, 1, values);
      for (int r = 0; r < RR; r++) acc[r * NN + n] += at(x + r * xs, k, K) * rest;
    }
}

/* y[r][n] for RR rows and a panel of 16 columns, NN of them at a time. */
static INLINE void panel(const I format, const int RR, const int NN, const float *x, I xs, const char *w, I stride,
                         const uint8_t *exponents, I K, float *y, I ys, I ahead) {
  V acc[2 * PANEL];
  float out[2 * PANEL];
  for (int n = 0; n < PANEL; n += NN) {
    tile(format, RR, NN, x, xs, w + n * stride, stride, exponents + n * groups(K), K, acc, ahead);
#pragma GCC unroll 32
    for (int i = RR * NN; i % PANEL; i++) acc[i] = (V){0};
    store(out, sums(acc));
    if (RR * NN > PANEL) store(out + PANEL, sums(acc + PANEL));
    for (int r = 0; r < RR; r++) memcpy(y + r * ys + n, out + r * NN, NN * sizeof(float));
  }
}

/* y[r][n] = x[r] . w[n] for n in from..to; rows of x, w and y are xs, stride and ys apart. ahead: bytes from a panel's
   weights to those of the next, 0 to ask for nothing. */
static INLINE void product(const I format, const float *x, I xs, I rows, const char *w, I stride,
                           const uint8_t *exponents, I K, float *y, I ys, I from, I to, I ahead) {
  const I G = groups(K);
  for (I n = from; n < to; n += PANEL) {
    const char *v = w + n * stride;
    const uint8_t *e = exponents + n * G;
    if (n + PANEL > to) {
      for (; n < to; n++, v += stride, e += G)
        for (I r = 0; r < rows; r++) {
          V acc[1];
          tile(format, 1, 1, x + r * xs, xs, v, stride, e, K, acc, 0);
          y[r * ys + n] = sum(acc[0]);
        }
      return;
    }
    const int odd = K >= LONG, broad = odd && format == FLOAT32; /* others spend their registers on unpacking */
#define TAKE(RR, NN)                                                                                                   \
  panel(format, RR, NN, x + r * xs, xs, v, stride, e, K, y + r * ys + n, ys, r ? 0 : ahead)
    BY_TILES(rows, odd, broad, 2)
#undef TAKE
  }
}

/* y[rows][n] = bias + x[rows][K] w^T for n in from..to; rows of y are N apart. */
static void columns(const Team *t, const Matrix *w, const float *x, I rows, float *y, I from, I to) {
  const I N = w->N, K = w->K, stride = row_bytes(w->format, K), ahead = PANEL * stride;
  const char *base = w->at, *scales = base + N * stride;
  const uint8_t *exponents = (const uint8_t *)scales;
  if (w->format == FLOAT32) panel_product(x, K, rows, w->at, K, y, N, from, to);
  if (halved(w->format)) {
    const int parts = w->format == BF16 ? 2 : 1;
    if (has_pairs()) pair_product(parts, split(parts, x, rows, K, t->room), rows, base, stride, y, N, from, to);
    else product(BF16, x, K, rows, base, stride, 0, K, y, N, from, to, ahead);
  }
  if (w->format == INT8) product(INT8, x, K, rows, base, stride, 0, K, y, N, from, to, ahead);
  if (w->format == MXFP4) product(MXFP4, x, K, rows, base, stride, exponents, K, y, N, from, to, ahead);
  for (I r = 0; r < rows; r++) {
    if (w->format == INT8)
      for (I n = from; n < to; n++) y[r * N + n] *= ((const float *)scales)[n];
    if (w->bias)
      for (I n = from; n < to; n++) y[r * N + n] += w->bias[n];
  }
}

/* y[rows][N] = bias + x[rows][K] w^T: each of the team its columns. Nobody waits. */
static void linear(const Team *t, Matrix w, const float *x, I rows, float *y) {
  I from, to;
  share(t, w.N, PANEL, &from, &to);
  columns(t, &w, x, rows, y, from, to);
}

#endif
