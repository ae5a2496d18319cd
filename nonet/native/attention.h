/* Softmax attention of heads that share their keys, over pages of PAGE positions.

   Positions are taken in spans of SPAN. Each span's say is computed apart, by whichever thread, and the spans are
   brought together in order, so that neither the pages, nor the threads, nor the other rows show in the result:

       span s:  m_s = max of the scores, t_s = sum e^(score - m_s), o_s = sum e^(score - m_s) value
       m = max m_s;  out = sum e^(m_s - m) o_s / sum e^(m_s - m) t_s */

#ifndef NONET_ATTENTION_H
#define NONET_ATTENTION_H

#include "products.h"

enum { PAGE = LANES, SPAN = 256, PAGES = SPAN / PAGE };

/* Rows of floats, PAGE of them in a page, `row` floats apart in it; page ids in order. */
typedef struct {
  const float *pool;
  const I *table;
  I page, row;
} Paged;

static inline const float *page_at(const Paged *p, I l) { return p->pool + p->table[l / PAGE] * p->page; }

/* What `heads` heads read: L positions, keys kn wide, values vn wide. */
typedef struct {
  Paged keys, values;
  I heads, L, kn, vn;
  float scale;
} Sight;

static inline I spans(I L) { return (L + SPAN - 1) / SPAN; }
/* Floats of one head's say on one span: o_s, m_s, t_s. */
static inline I record(I vn) { return vn + 2; }

static inline void fetch(const float *p, I n) {
  for (I i = 0; i < n; i += LANES) __builtin_prefetch(p + i, 0, 2);
}

/* out[h][i..] = sum over l < n of w[h][l] v[l][i..] on an HH x VV tile of vectors; pages[p] holds v[PAGE p ..]. */
static INLINE void mix_tile(const int HH, const int VV, const float *w, I ws, const float *const *pages, I n, I vs,
                            I vn, I i, float *out, I os) {
  V acc[HH * VV];
#pragma GCC unroll 16
  for (int j = 0; j < HH * VV; j++) acc[j] = (V){0};
  for (I l = 0; l < n; l++) {
    const float *v = pages[l / PAGE] + l % PAGE * vs;
    V values[VV];
#pragma GCC unroll 4
    for (int j = 0; j < VV; j++) values[j] = VV > 1 ? load(v + i + j * LANES) : at(v, i, vn);
#pragma GCC unroll 4
    for (int h = 0; h < HH; h++)
#pragma GCC unroll 4
      for (int j = 0; j < VV; j++) acc[h * VV + j] += w[h * ws + l] * values[j];
  }
  for (int h = 0; h < HH; h++)
    for (int j = 0; j < VV; j++) put(out + h * os, i + j * LANES, vn, acc[h * VV + j]);
}

static INLINE void mix_heads(const int HH, const float *w, I ws, const float *const *pages, I n, I vs, I vn, float *out,
                             I os) {
  I i = 0;
  for (; i + 4 * LANES <= vn; i += 4 * LANES) mix_tile(HH, 4, w, ws, pages, n, vs, vn, i, out, os);
  for (; i < vn; i += LANES) mix_tile(HH, 1, w, ws, pages, n, vs, vn, i, out, os);
}

/* out[h][vn] = sum over l < n <= SPAN of w[h][l] v[l] for all heads; their rows of w and out are ws and os apart. */
static void mix(I heads, const float *w, I ws, const float *const *pages, I n, I vs, I vn, float *out, I os) {
  I h = 0;
  for (; h + 4 <= heads; h += 4) mix_heads(4, w + h * ws, ws, pages, n, vs, vn, out + h * os, os);
  for (; h + 2 <= heads; h += 2) mix_heads(2, w + h * ws, ws, pages, n, vs, vn, out + h * os, os);
  for (; h < heads; h++) mix_heads(1, w + h * ws, ws, pages, n, vs, vn, out + h * os, os);
}

/* w[n] <- e^(scale w - m) with zeros up to a whole vector; say gets m and the sum. */
static void weigh(float *w, I n, float scale, float *m, float *t) {
  V top = splat(-INFINITY), total = {0};
  for (I l = n; l % LANES; l++) w[l] = -INFINITY;
  for (I l = 0; l < n; l += LANES) {
    V e = load(w + l) * scale;
    store(w + l, e);
    top = pick(e > top, e, top);
  }
  for (int i = 1; i < LANES; i++) top[0] = top[i] > top[0] ? top[i] : top[0];
  for (I l = 0; l < n; l += LANES) {
    V e = load(w + l);
    e = pick(e > -INFINITY, vexp(e - top[0]), splat(0));
    store(w + l, e);
    total += e;
  }
  *m = top[0];
  *t = sum(total);
}

/* The say of all heads on span s: says[heads][record]. q[heads] are qs apart; w: room for heads * SPAN scores. */
static void attend_span(const Sight *a, const float *q, I qs, I s, float *says, float *w) {
  const I from = s * SPAN, n = a->L - from < SPAN ? a->L - from : SPAN, R = record(a->vn);
  const int apart = a->values.pool != a->keys.pool;
  const float *values[PAGES];
  for (I l = 0; l < n; l += PAGE) {
    const float *keys = page_at(&a->keys, from + l), *next = l + PAGE < n ? page_at(&a->keys, from + l + PAGE) : keys;
    values[l / PAGE] = page_at(&a->values, from + l);
    if (apart) fetch(values[l / PAGE], (n - l < PAGE ? n - l : PAGE) * a->values.row);
    product(FLOAT32, q, qs, a->heads, (const char *)keys, 4 * a->keys.row, 0, a->kn, w + l, SPAN, 0, PAGE,
            4 * (next - keys));
  }
  for (I h = 0; h < a->heads; h++)
    weigh(w + h * SPAN, n, a->scale, says + h * R + a->vn, says + h * R + a->vn + 1);
  mix(a->heads, w, SPAN, values, n, a->values.row, a->vn, says, R);
}

/* out[vn] from the says of one head on n spans, `apart` floats apart. */
static void combine(const float *says, I n, I apart, I vn, float *out) {
  float top = -INFINITY, total = 0;
  for (I s = 0; s < n; s++) top = says[s * apart + vn] > top ? says[s * apart + vn] : top;
  for (I s = 0; s < n; s++) {
    const float *say = says + s * apart, f = expf(say[vn] - top);
    total += f * say[vn + 1];
    MAP(vn, say, out, s ? at(out, i_, n_) + f * e : f * e);
  }
  float share = 1.0f / total;
  MAP(vn, out, out, e * share);
}

#endif
