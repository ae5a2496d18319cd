/* The two softmax mixers, one position per row: y[rows][D] from h[rows][D]. Layouts are those of model/state.py,
   formulas those of model/attention.py. Between meetings each thread writes its own part alone; all rows enter the
   cache before any reads it, so that the tokens of a sequence see those before them. */

#ifndef NONET_DECODE_ATTENTION_H
#define NONET_DECODE_ATTENTION_H

#include "decode_model.h"

static void rotate(float *x, const float *cos, const float *sin, I K) {
  for (I i = 0; i < K / 2; i++) {
    float a = x[i], b = x[i + K / 2];
    x[i] = a * cos[i] + b * sin[i];
    x[i + K / 2] = b * cos[i + K / 2] + a * sin[i + K / 2];
  }
}

/* What key head g of a row reads; row r is number first + r of the batch. */
static Sight gqa_sight(const Work *w, const Layer *l, I r, I g) {
  const Model *m = w->m;
  const I head = PAGE * m->K, page = m->G * head, *table = w->row[r].table;
  const Paged keys = {l->pool + g * head, table, page, m->K}, values = {l->pool2 + g * head, table, page, m->K};
  return (Sight){keys, values, m->H / m->G, w->row[r].seen, m->K, m->K, m->skip, 1.0f / sqrtf(m->K)};
}

static Sight mla_sight(const Work *w, const Layer *l, I r, I unused) {
  (void)unused;
  const Model *m = w->m;
  const I T = m->R + m->extra, L = w->row[r].seen;
  const Paged latents = {l->pool, w->row[r].table, PAGE * T, T};
  return (Sight){latents, latents, m->H, L, T, m->R, m->skip, 1.0f / sqrtf(m->nope + m->extra)};
}

/* Every span of every group of heads of every row, shared among the team. The tokens of a sequence look at a span one
   after another, while it is in the cache. q[rows][groups][heads][kn]; a row's says are [span][groups * heads][record]
   from starts[r] on. */
static void attend(const Work *w, const Layer *l, Sight (*sight)(const Work *, const Layer *, I, I), I groups,
                   const float *q, float *says, const I *starts) {
  const I run = w->where->T < w->rows ? w->where->T : w->rows;
  I items = 0, from, to, item = 0;
  for (I r = 0; r < w->rows; r++) items += groups * spans(w->row[r].seen);
  share(&w->team, items, 1, &from, &to);
  for (I first = 0; first < w->rows; first += run)
    for (I g = 0; g < groups; g++) {
      const I last = first + run - 1, after = g + 1 < groups || last + 1 == w->rows ? last : last + run;
      const Sight whole = sight(w, l, last, g), next = sight(w, l, after, (g + 1) % groups);
      const I head = g * whole.heads, all = groups * whole.heads, n = spans(whole.L), size = record(whole.vn);
      for (I s = 0; s < n; s++)
        for (I r = first; r <= last; r++) {
          if (s >= spans(w->row[r].seen) || item++ < from || item > to) continue;
          const Sight a = sight(w, l, r, g);
          const Later later = s + 1 < n ? keys_of(&whole, s + 1) : keys_of(&next, 0);
          float *say = says + starts[r] + (s * all + head) * size;
          attend_span(&a, q + (r * all + head) * a.kn, a.kn, s, say, w->own, &later);
        }
    }
}

/* starts[r]: where the says of row r begin. Returns their number of floats, all rows together. */
static I say_starts(const Work *w, I heads, I vn, I *starts) {
  I at = 0;
  for (I r = 0; r < w->rows; r++) {
    starts[r] = at;
    at += spans(w->row[r].seen) * heads * record(vn);
  }
  return at;
}

/* out[vn]: head j of row r, its spans brought together. */
static void gather(const Work *w, const float *says, const I *starts, I r, I j, I vn, float *out) {
  const I one = w->m->H * record(vn);
  combine(says + starts[r] + j * record(vn), spans(w->row[r].seen), one, vn, out);
}

/* One key head of one row: its queries and key normed and turned, key and value put into the cache. */
static void gqa_enter(const Work *w, const Layer *l, I r, I g, float *q, float *k, const float *v) {
  const Model *m = w->m;
  const I number = w->first + r, K = m->K, L = w->row[r].seen - 1, heads = m->H / m->G;
  const Sight a = gqa_sight(w, l, r, g);
  for (I j = 0; j <= heads; j++) {
    float *x = j < heads ? q + j * K : k;
    const float *norm = j < heads ? l->q_norm : l->k_norm;
    if (norm) rmsnorm(x, norm, x, K, m->eps);
    if (w->where->cos) rotate(x, w->where->cos + number * K, w->where->sin + number * K, K);
  }
  memcpy((float *)page_at(&a.keys, L) + L % PAGE * K, k, K * sizeof(float));
  memcpy((float *)page_at(&a.values, L) + L % PAGE * K, v, K * sizeof(float));
}

static void gqa(const Work *w, const Layer *l, const float *h, float *y) {
  const Model *m = w->m;
  const Team *t = &w->team;
  const I H = m->H, G = m->G, K = m->K, D = m->D, rows = w->rows;
  float *q = w->shared, *k = q + rows * H * K, *v = k + rows * G * K, *o = v + rows * G * K, *says = o + rows * H * K;
  I starts[MOST], from, to;
  say_starts(w, H, K, starts);
  linear(t, weight(m, l->q, l->q_b, H * K, l->reads), h, rows, q);
  linear(t, weight(m, l->k, l->k_b, G * K, l->reads), h, rows, k);
  linear(t, weight(m, l->v, l->v_b, G * K, l->reads), h, rows, v);
  meet(t);
  share(t, rows * G, 1, &from, &to);
  for (I i = from; i < to; i++) gqa_enter(w, l, i / G, i % G, q + i * (H / G) * K, k + i * K, v + i * K);
  meet(t);
  attend(w, l, gqa_sight, G, q, says, starts);
  meet(t);
  share(t, rows * H, 1, &from, &to);
  for (I i = from; i < to; i++) gather(w, says, starts, i / H, i % H, K, o + i * K);
  meet(t);
  linear(t, weight(m, l->o, l->o_b, D, H * K), o, rows, y);
}

/* Queries of head j, all rows, carried into the latent space by W_k [N][R]: query[r][j] = [q_nope W_k; q_extra]. */
static void absorb(const Work *w, const Layer *l, I j, const float *q, float *query) {
  const Model *m = w->m;
  const I H = m->H, N = m->nope, E = m->extra, R = m->R, T = R + E, width = N + E;
  const float *pages[N / PAGE + 1];
  for (I n = 0; n < N; n += PAGE) pages[n / PAGE] = l->kv_b + (j * (N + m->VD) + n) * R;
  mix(w->rows, q + j * width, H * width, pages, N, R, R, query + j * T, H * T, 0);
  for (I r = 0; r < w->rows; r++)
    memcpy(query + (r * H + j) * T + R, q + (r * H + j) * width + N, E * sizeof(float));
}

/* Rows of low[rows][q_rank] and of the cache's newest entries, normed. */
static void mla_enter(const Work *w, const Layer *l, float *low, float *kv) {
  const Model *m = w->m;
  const I T = m->R + m->extra;
  I from, to;
  share(&w->team, w->rows, 1, &from, &to);
  for (I r = from; r < to; r++) {
    const Sight a = mla_sight(w, l, r, 0);
    const I L = a.L - 1;
    float *x = kv + r * T;
    if (m->q_rank) rmsnorm(low + r * m->q_rank, l->q_a_norm, low + r * m->q_rank, m->q_rank, m->mla_eps);
    rmsnorm(x, l->kv_a_norm, x, m->R, m->mla_eps);
    memcpy((float *)page_at(&a.keys, L) + L % PAGE * T, x, T * sizeof(float));
  }
}

/* Head j's outputs, all rows: the latents it gathered, carried out by W_v [VD][R], gated. */
static void mla_leave(const Work *w, const Layer *l, I j, const float *says, const I *starts, float *mixed,
                      const float *gate, float *o) {
  const Model *m = w->m;
  const I H = m->H, R = m->R, VD = m->VD, rows = w->rows;
  const float *wv = l->kv_b + (j * (m->nope + VD) + m->nope) * R;
  for (I r = 0; r < rows; r++) gather(w, says, starts, r, j, R, mixed + (r * H + j) * R);
  product(FLOAT32, mixed + j * R, H * R, rows, (const char *)wv, 4 * R, 0, R, o + j * VD, H * VD, 0, VD, PANEL * 4 * R);
  for (I r = 0; l->g && r < rows; r++) {
    float *x = o + (r * H + j) * VD;
    const float *z = gate + (r * H + j) * VD;
    MAP(VD, x, x, vsigmoid(at(z, i_, n_)) * e);
  }
}

static void mla(const Work *w, const Layer *l, const float *h, float *y) {
  const Model *m = w->m;
  const Team *t = &w->team;
  const I H = m->H, N = m->nope, E = m->extra, R = m->R, VD = m->VD, D = m->D, T = R + E, rows = w->rows;
  float *low = w->shared, *q = low + rows * m->q_rank, *kv = q + rows * H * (N + E), *gate = kv + rows * T;
  float *query = gate + rows * H * VD, *mixed = query + rows * H * T, *o = mixed + rows * H * R;
  float *says = o + rows * H * VD;
  I starts[MOST], from, to;
  say_starts(w, H, R, starts);
  linear(t, m->q_rank ? weight(m, l->q_a, 0, m->q_rank, D) : weight(m, l->q, 0, H * (N + E), D), h, rows,
         m->q_rank ? low : q);
  linear(t, weight(m, l->kv_a, 0, T, D), h, rows, kv);
  if (l->g) linear(t, weight(m, l->g, 0, H * VD, D), h, rows, gate);
  meet(t);
  mla_enter(w, l, low, kv);
  meet(t);
  if (m->q_rank) {
    linear(t, weight(m, l->q_bb, 0, H * (N + E), m->q_rank), low, rows, q);
    meet(t);
  }
  share(t, H, 1, &from, &to);
  for (I j = from; j < to; j++) absorb(w, l, j, q, query);
  meet(t);
  attend(w, l, mla_sight, 1, query, says, starts);
  meet(t);
  for (I j = from; j < to; j++) mla_leave(w, l, j, says, starts, mixed, gate, o);
  meet(t);
  linear(t, weight(m, l->o, 0, D, H * VD), o, rows, y);
}

#endif
