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

/* What `heads` heads read: L positions but the first `skip` (less than SPAN), keys kn wide, values vn wide. */
typedef struct {
  Paged keys, values;
  I heads, L, kn, vn, skip;
  float scale;
} Sight;

/* Keys that will be read soon: one row of each page's PAGE is fetched for every position mixed meanwhile. */
typedef struct {
  const float *pages[PAGES];
  I row;
} Later;

/* The keys of span s, or as many pages of them as there are; the last stands for those there are not. */
static inline Later keys_of(const Sight *a, I s) {
  Later later = {.row = a->keys.row};
  for (I p = 0, l = s * SPAN; p < PAGES; p++, l += PAGE) later.pages[p] = page_at(&a->keys, l < a->L ? l : a->L - 1);
  return later;
}

static inline I spans(I L) { return (L + SPAN - 1) / SPAN; }
/* Floats of one head's say on one span: o_s, m_s, t_s. */
static inline I record(I vn) { return vn + 2; }

static inline void fetch(const float *p, I n) {
  for (I i = 0; i < n; i += LANES) __builtin_prefetch(p + i, 0, 2);
}

/* out[h][i..] = sum over l < n of w[h][l] v[l][i..] on an HH x VV tile of vectors; pages[p] holds v[PAGE p ..]. Narrow
   tiles sum 4 / VV positions apart, so that no sum waits for the last. `later` are fetched on the way. */
static INLINE void mix_tile(const int HH, const int VV, const float *w, I ws, const float *const *pages, I n, I vs,
                            I vn, I i, float *out, I os, const Later *later) {
  const int PP = 4 / VV;
  V acc[HH * 4];
#pragma GCC unroll 16
  for (int j = 0; j < HH * 4; j++) acc[j] = (V){0};
  for (I l = 0; l < n; l += PP) {
    if (later) fetch(later->pages[l / PAGE] + l % PAGE * later->row, PP * later->row);
#pragma GCC unroll 4
    for (int p = 0; p < PP; p++) {
      if (p && l + p >= n) break;
      const float *v = pages[l / PAGE] + (l % PAGE + p) * vs + i;
#pragma GCC unroll 4
      for (int j = 0; j < VV; j++) {
        const V value = VV > 1 ? load(v + j * LANES) : at(v, 0, vn - i);
#pragma GCC unroll 4
        for (int h = 0; h < HH; h++) acc[(h * PP + p) * VV + j] += w[h * ws + l + p] * value;
      }
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < HH; h++)
#pragma GCC unroll 4
    for (int j = 0; j < VV; j++) {
      V total = acc[h * 4 + j];
#pragma GCC unroll 4
      for (int p = 1; p < PP; p++) total += acc[(h * PP + p) * VV + j];
      put(out + h * os, i + j * LANES, vn, total);
    }
}

static INLINE void mix_heads(const int HH, const float *w, I ws, const float *const *pages, I n, I vs, I vn, float *out,
                             I os, const Later *later) {
  I i = 0;
  for (; i + 4 * LANES <= vn; i += 4 * LANES) mix_tile(HH, 4, w, ws, pages, n, vs, vn, i, out, os, i ? 0 : later);
  for (; i + 2 * LANES <= vn; i += 2 * LANES) mix_tile(HH, 2, w, ws, pages, n, vs, vn, i, out, os, i ? 0 : later);
  for (; i < vn; i += LANES) mix_tile(HH, 1, w, ws, pages, n, vs, vn, i, out, os, i ? 0 : later);
}

/* out[h][vn] = sum over l < n <= SPAN of w[h][l] v[l] for all heads; their rows of w and out are ws and os apart. */
static void mix(I heads, const float *w, I ws, const float *const *pages, I n, I vs, I vn, float *out, I os,
                const Later *later) {
  I h = 0;
  for (; h + 4 <= heads; h += 4) mix_heads(4, w + h * ws, ws, pages, n, vs, vn, out + h * os, os, h ? 0 : later);
  for (; h + 2 <= heads; h += 2) mix_heads(2, w + h * ws, ws, pages, n, vs, vn, out + h * os, os, h ? 0 : later);
  for (; h < heads; h++) mix_heads(1, w + h * ws, ws, pages, n, vs, vn, out + h * os, os, h ? 0 : later);
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

/* The say of all heads on span s: says[heads][record]. q[heads] are qs apart; w: room for heads * SPAN scores; `later`:
   keys of the call to come. */
static void attend_span(const Sight *a, const float *q, I qs, I s, float *says, float *w, const Later *later) {
  const I from = s * SPAN, n = a->L - from < SPAN ? a->L - from : SPAN, R = record(a->vn);
  const int apart = a->values.pool != a->keys.pool;
  const float *values[PAGES];
  for (I l = 0; l < n; l += PAGE) {
    const char *keys = (const char *)page_at(&a->keys, from + l);
    values[l / PAGE] = page_at(&a->values, from + l);
    if (apart) fetch(values[l / PAGE], (n - l < PAGE ? n - l : PAGE) * a->values.row);
    product(FLOAT32, q, qs, a->heads, keys, 4 * a->keys.row, 0, a->kn, w + l, SPAN, 0, PAGE, 0);
  }
  for (I h = 0; s == 0 && h < a->heads; h++)
    for (I l = 0; l < a->skip; l++) w[h * SPAN + l] = -INFINITY;
  for (I h = 0; h < a->heads; h++)
    weigh(w + h * SPAN, n, a->scale, says + h * R + a->vn, says + h * R + a->vn + 1);
  mix(a->heads, w, SPAN, values, n, a->values.row, a->vn, says, R, later);
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
