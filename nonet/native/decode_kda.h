/* Kimi delta attention, one position per row: y[rows][D] from h[rows][D]; formulas those of model/kda.py. A token reads
   the memory that the one before it left in its slot, and leaves its own in another or the same. */

#ifndef NONET_DECODE_KDA_H
#define NONET_DECODE_KDA_H

#include "decode_model.h"

/* by_tap[kernel][K]: taps [K][kernel] of one head. */
static void turn(const float *taps, I K, I kernel, float *by_tap) {
  for (I c = 0; c < K; c++)
    for (I j = 0; j < kernel; j++) by_tap[j * K + c] = taps[c * kernel + j];
}

/* Convolve K channels with their remembered inputs, apply SiLU, shift the memory. tail, next: [kernel-1][stride], the
   memory before and after; they may be the same. */
static void convolve(float *x, const float *by_tap, const float *tail, float *next, I stride, I K, I kernel) {
  for (I i = 0; i < K; i += LANES) {
    const V now = at(x, i, K);
    V y = now * at(by_tap + (kernel - 1) * K, i, K);
    for (I j = 0; j < kernel - 1; j++) {
      y += at(tail + j * stride, i, K) * at(by_tap + j * K, i, K);
      put(next + j * stride, i, K, j + 2 < kernel ? at(tail + (j + 1) * stride, i, K) : now);
    }
    put(x, i, K, y * vsigmoid(y));
  }
}

/* NN vectors of columns of the delta rule. Reading S with q in the pass that reads it with k leaves one pass that
   writes: d = beta (v - S^T (a o k)), o = S^T (a o q) + (q . k) d, next = a o S + k d^T, which may lie where S does. */
static INLINE void delta_band(const int NN, const float *S, float *next, const float *soon, I K, I i, const float *a,
                              const float *ka, const float *qa, const float *k, float qk, const float *v, float beta,
                              float *o) {
  V read[NN], out[NN];
#pragma GCC unroll 4
  for (int n = 0; n < NN; n++) read[n] = out[n] = (V){0};
  for (I j = 0; j < K; j++)
#pragma GCC unroll 4
    for (int n = 0; n < NN; n++) {
      V s = NN > 1 ? load(S + j * K + i + n * LANES) : at(S + j * K, i, K);
      read[n] += ka[j] * s;
      out[n] += qa[j] * s;
    }
#pragma GCC unroll 4
  for (int n = 0; n < NN; n++) {
    read[n] = beta * (at(v, i + n * LANES, K) - read[n]);
    put(o, i + n * LANES, K, out[n] + qk * read[n]);
  }
  for (I j = 0; j < K; j++)
#pragma GCC unroll 4
    for (int n = 0; n < NN; n++) {
      const float *s = S + j * K;
      if (soon) __builtin_prefetch(soon + j * K + i + n * LANES, 0, 2);
      if (NN > 1) store(next + j * K + i + n * LANES, a[j] * load(s + i + n * LANES) + k[j] * read[n]);
      else put(next + j * K, i, K, a[j] * at(s, i, K) + k[j] * read[n]);
    }
}

static void delta(const float *q, const float *k, const float *v, const float *g, float beta, const float *S,
                  float *next, const float *soon, float *o, I K) {
  float a[K], ka[K], qa[K];
  MAP(K, g, a, vexp(e));
  MAP(K, k, ka, e * at(a, i_, n_));
  MAP(K, q, qa, e * at(a, i_, n_));
  const float qk = dot(q, k, K);
  I i = 0;
  for (; i + 4 * LANES <= K; i += 4 * LANES) delta_band(4, S, next, soon, K, i, a, ka, qa, k, qk, v, beta, o);
  for (; i < K; i += LANES) delta_band(1, S, next, soon, K, i, a, ka, qa, k, qk, v, beta, o);
}

static void l2_normalise(float *x, I K, float scale) {
  float r = scale / sqrtf(dot(x, x, K) + 1e-6f);
  for (I i = 0; i < K; i++) x[i] *= r;
}

/* g[K] of head j, in place: the logarithm of its decay. */
static void decay(const Model *m, const Layer *l, I j, float *g) {
  const I K = m->KK;
  const float rate = expf(l->decay[j]), *dt = l->dt + j * K;
  if (m->softplus) MAP(K, g, g, -rate * vsoftplus(e + at(dt, i_, n_)))
  else MAP(K, g, g, m->lower * vsigmoid((e + at(dt, i_, n_)) * rate));
}

/* What the projections made of one token, by row: q, k, v, g and the output gate are [rows][H * KK], beta [rows][H]. */
typedef struct {
  float *q, *k, *v, *g, *gate, *beta;
} Delta;

/* The state that row r starts head j from. */
static const float *state_before(const Work *w, const Layer *l, I r, I j) {
  return l->pool + (w->row[r].before * w->m->H + j) * w->m->KK * w->m->KK;
}

/* What row r remembers of head j's inputs to q's convolution; k's and v's lie C and 2 C behind. */
static const float *tail_before(const Work *w, const Layer *l, I r, I j) {
  const Model *m = w->m;
  return l->pool2 + w->row[r].before * (m->kernel - 1) * 3 * m->H * m->KK + j * m->KK;
}

/* Ask for it, line by line. */
static void want_tail(const Model *m, const float *tail) {
  const I C = m->H * m->KK;
  for (I i = 0; i < 3 * (m->kernel - 1); i++)
    for (I k = 0; k < m->KK; k += LANES) __builtin_prefetch(tail + i * C + k, 1, 2);
}

/* Head j of row r; its gated output replaces the gate. taps: of q, k and v, by tap; soon: the state wanted next. */
static void kda_head(const Work *w, const Layer *l, const Delta *p, I r, I j, const float *taps, const float *soon,
                     const float *soon_tail) {
  const Model *m = w->m;
  const I K = m->KK, C = m->H * K, past = m->kernel - 1, i = r * C + j * K;
  const I after = w->row[r].after;
  const float *tail = tail_before(w, l, r, j), *S = state_before(w, l, r, j);
  float *next = l->pool2 + after * past * 3 * C + j * K, o[K], *gate = p->gate + i;
  convolve(p->q + i, taps, tail, next, 3 * C, K, m->kernel);
  convolve(p->k + i, taps + m->kernel * K, tail + C, next + C, 3 * C, K, m->kernel);
  convolve(p->v + i, taps + 2 * m->kernel * K, tail + 2 * C, next + 2 * C, 3 * C, K, m->kernel);
  decay(m, l, j, p->g + i);
  l2_normalise(p->q + i, K, 1.0f / sqrtf(K));
  l2_normalise(p->k + i, K, 1.0f);
  const float beta = 1.0f / (1.0f + expf(-p->beta[r * m->H + j]));
  if (soon_tail) want_tail(m, soon_tail);
  delta(p->q + i, p->k + i, p->v + i, p->g + i, beta, S, l->pool + (after * m->H + j) * K * K, soon, o, K);
  rmsnorm(o, l->o_norm, o, K, m->eps);
  MAP(K, gate, gate, vsigmoid(e) * at(o, i_, n_));
}

static void kda(const Work *w, const Layer *l, const float *h, float *y) {
  const Model *m = w->m;
  const Team *t = &w->team;
  const I H = m->H, K = m->KK, C = H * K, D = m->D, rows = w->rows;
  float *s = w->shared, *low = s + 5 * rows * C + rows * H, *low2 = low + rows * m->rank;
  const Delta p = {s, s + rows * C, s + 2 * rows * C, s + 3 * rows * C, s + 4 * rows * C, s + 5 * rows * C};
  linear(t, weight(m, l->q, 0, C, D), h, rows, p.q);
  linear(t, weight(m, l->k, 0, C, D), h, rows, p.k);
  linear(t, weight(m, l->v, 0, C, D), h, rows, p.v);
  linear(t, weight(m, l->beta, 0, H, D), h, rows, p.beta);
  linear(t, weight(m, l->f_a, 0, m->rank, D), h, rows, low);
  if (m->gate_rank) linear(t, weight(m, l->g_a, 0, m->gate_rank, D), h, rows, low2);
  else linear(t, weight(m, l->g, 0, C, D), h, rows, p.gate);
  meet(t);
  linear(t, weight(m, l->f_b, 0, C, m->rank), low, rows, p.g);
  if (m->gate_rank) linear(t, weight(m, l->g, 0, C, m->gate_rank), low2, rows, p.gate);
  meet(t);
  I from, to;
  share(t, H * rows, rows < w->where->T ? rows : w->where->T, &from, &to); /* a sequence's tokens stay together */
  for (I i = from, turned = -1; i < to; i++) { /* head by head, so that its taps are turned once for all rows */
    const I j = i / rows, at = j * K * m->kernel;
    if (j != turned) {
      turn(l->q_conv + at, K, m->kernel, w->own);
      turn(l->k_conv + at, K, m->kernel, w->own + m->kernel * K);
      turn(l->v_conv + at, K, m->kernel, w->own + 2 * m->kernel * K);
      turned = j;
    }
    const I row = (i + 1) % rows, head = (i + 1) / rows;
    const int more = i + 1 < to;
    kda_head(w, l, &p, i % rows, j, w->own, more ? state_before(w, l, row, head) : 0,
             more ? tail_before(w, l, row, head) : 0);
  }
  meet(t);
  linear(t, weight(m, l->o, 0, D, C), p.gate, rows, y);
}

#endif
