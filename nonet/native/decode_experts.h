/* Feed-forwards, y[rows][D] from h[rows][D]: dense, or routed experts beside a shared one (model/moe.py). */

#ifndef NONET_EXPERTS_H
#define NONET_EXPERTS_H

#include "decode_model.h"
#include "quant.h"

/* hidden[rows][F] <- act(gate x, up x), this thread's columns from..to; `up` is room for rows * F. */
static void gated(const Work *w, Matrix gate, Matrix up, const float *x, I rows, float *hidden, float *spare, I from,
                  I to) {
  const Model *m = w->m;
  const I F = gate.N;
  columns(&w->team, &gate, x, rows, hidden, from, to);
  columns(&w->team, &up, x, rows, spare, from, to);
  for (I r = 0; r < rows; r++) {
    float *z = hidden + r * F + from, *u = spare + r * F + from;
    MAP(to - from, z, z, activate(m, e, at(u, i_, n_)));
  }
}

/* The dense or shared feed-forward's hidden[rows][F]; spare: as much again. */
static void dense_up(const Work *w, const Layer *l, const float *h, float *hidden, float *spare) {
  const Model *m = w->m;
  I from, to;
  share(&w->team, l->F, GROUP, &from, &to);
  gated(w, weight(m, l->gate, l->gate_b, l->F, m->D), weight(m, l->up, l->up_b, l->F, m->D), h, w->rows, hidden, spare,
        from, to);
}

static void dense(const Work *w, const Layer *l, const float *h, float *y) {
  float *hidden = w->shared, *spare = hidden + w->rows * l->F;
  dense_up(w, l, h, hidden, spare);
  meet(&w->team);
  linear(&w->team, weight(w->m, l->down, l->down_b, w->m->D, l->F), hidden, w->rows, y);
}

/* Scores of one row, in place of its logits, and its top_k experts by score + bias (the lower index first among equals)
   with their weights. */
static void route(const Model *m, const Layer *l, float *scores, I *chosen, float *weights) {
  I E = m->E;
  MAP(E, scores, scores, vsigmoid(e));
  float total = m->renormalise ? 1e-20f : 0;
  for (I k = 0; k < m->top_k; k++) {
    I best = -1;
    for (I e = 0; e < E; e++) {
      int taken = 0;
      for (I j = 0; j < k; j++) taken |= chosen[j] == e;
      if (!taken && (best < 0 || scores[e] + l->bias[e] > scores[best] + l->bias[best])) best = e;
    }
    chosen[k] = best;
    weights[k] = scores[best];
    if (m->renormalise) total += scores[best];
  }
  for (I k = 0; k < m->top_k; k++) weights[k] = (m->renormalise ? weights[k] / total : weights[k]) * m->scale;
}

/* Who goes to which expert: expert e has the visits begin[e] .. begin[e + 1], rows in ascending order. A visit is a
   slot r * top_k + k of `chosen` and `weights`, which the team shares; each thread sorts for itself. */
typedef struct {
  I *chosen, *begin, *visits;
  float *weights;
} Routes;

static void sort_visits(const Model *m, I rows, const Routes *p) {
  const I slots = rows * m->top_k;
  memset(p->begin, 0, (m->E + 1) * sizeof(I));
  for (I i = 0; i < slots; i++) p->begin[p->chosen[i] + 1]++;
  for (I e = 0; e < m->E; e++) p->begin[e + 1] += p->begin[e];
  for (I i = 0; i < slots; i++) p->visits[p->begin[p->chosen[i]]++] = i;
  for (I e = m->E; e > 0; e--) p->begin[e] = p->begin[e - 1];
  p->begin[0] = 0;
}

/* hidden[visit][EF] of every visit, this thread's columns; z[rows][L]: what experts read. */
static void experts_up(const Work *w, const Layer *l, const Routes *p, const float *z, float *hidden) {
  const Model *m = w->m;
  const I L = m->L, F = m->EF;
  const Matrix gate = {l->w1, 0, m->expert_format, F, L}, up = {l->w3, 0, m->expert_format, F, L};
  float *mine = w->own, *spare = mine + w->rows * L;
  I from, to;
  share(&w->team, F, GROUP, &from, &to);
  for (I e = 0; e < m->E; e++) {
    const I first = p->begin[e], n = p->begin[e + 1] - first;
    float *out = hidden + first * F;
    for (I i = 0; i < n; i++) memcpy(mine + i * L, z + p->visits[first + i] / m->top_k * L, L * sizeof(float));
    if (n) gated(w, nth(gate, e), nth(up, e), mine, n, out, spare, from, to);
    for (I i = 0; i < n && from < to; i++) quantise(m, out + i * F + from, to - from);
  }
}

/* sum[rows][L] <- sum over a row's experts of weight * w2 hidden, experts in ascending order; this thread's columns. */
static void experts_down(const Work *w, const Layer *l, const Routes *p, const float *hidden, float *sum) {
  const Model *m = w->m;
  const I L = m->L, F = m->EF;
  const Matrix down = {l->w2, 0, m->expert_format, L, F};
  float *y = w->own;
  I from, to;
  share(&w->team, L, PANEL, &from, &to);
  for (I r = 0; r < w->rows; r++) memset(sum + r * L + from, 0, (to - from) * sizeof(float));
  for (I e = 0; e < m->E; e++) {
    const I first = p->begin[e], n = p->begin[e + 1] - first;
    const Matrix mine = nth(down, e);
    if (n) columns(&w->team, &mine, hidden + first * F, n, y, from, to);
    for (I i = 0; i < n; i++) {
      const I slot = p->visits[first + i];
      float *to_row = sum + slot / m->top_k * L;
      for (I j = from; j < to; j++) to_row[j] += p->weights[slot] * y[i * L + j];
    }
  }
}

/* y <- what the experts made, out of the latent space where there is one. */
static void leave_latent(const Work *w, const Layer *l, float *sum, float *y) {
  const Model *m = w->m;
  const I L = m->L;
  I from, to;
  if (!l->latent_up) {
    share(&w->team, w->rows * L, 1, &from, &to);
    memcpy(y + from, sum + from, (to - from) * sizeof(float));
    return;
  }
  share(&w->team, w->rows, 1, &from, &to);
  for (I r = from; r < to; r++) rmsnorm(sum + r * L, l->latent_norm, sum + r * L, L, m->eps);
  meet(&w->team);
  linear(&w->team, weight(m, l->latent_up, 0, m->D, L), sum, w->rows, y);
}

/* Each row's experts, by the thread whose row it is; what the experts read goes onto its grid. */
static void choose(const Work *w, const Layer *l, const Routes *p, float *scores, float *z) {
  const Model *m = w->m;
  I from, to;
  share(&w->team, w->rows, 1, &from, &to);
  for (I r = from; r < to; r++) {
    route(m, l, scores + r * m->E, p->chosen + r * m->top_k, p->weights + r * m->top_k);
    quantise(m, z + r * m->L, m->L);
  }
}

static void routed(const Work *w, const Layer *l, const float *h, float *y) {
  const Model *m = w->m;
  const Team *t = &w->team;
  const I D = m->D, E = m->E, L = m->L, F = l->F, rows = w->rows, slots = rows * m->top_k;
  I visits[MOST * MOST_CHOSEN], begin[E + 1], from, to;
  float *weights = w->shared + slots * (sizeof(I) / sizeof(float)), *scores = weights + slots, *z = scores + rows * E;
  float *hidden = z + rows * L, *sum = hidden + slots * m->EF, *common = sum + rows * L, *spare = common + rows * F;
  float *rest = spare + rows * F;
  const Routes p = {(I *)w->shared, begin, visits, weights};
  linear(t, (Matrix){l->router, 0, FLOAT32, E, D}, h, rows, scores);
  if (l->latent_down) linear(t, weight(m, l->latent_down, 0, L, D), h, rows, z);
  else if (t->rank == 0) memcpy(z, h, rows * D * sizeof(float));
  if (F) dense_up(w, l, h, common, spare);
  meet(t);
  choose(w, l, &p, scores, z);
  meet(t);
  sort_visits(m, rows, &p);
  experts_up(w, l, &p, z, hidden);
  meet(t);
  experts_down(w, l, &p, hidden, sum);
  if (F) linear(t, weight(m, l->down, l->down_b, D, F), common, rows, rest);
  meet(t);
  leave_latent(w, l, sum, y);
  if (!F) return;
  meet(t);
  share(t, rows * D, 1, &from, &to);
  for (I i = from; i < to; i++) y[i] += rest[i];
}

#endif
