/* A model as decoding sees it: torch's own memory, by address. Names follow model/native_decode.py. */

#ifndef NONET_MODEL_H
#define NONET_MODEL_H

#include "vector.h"

enum { BLOCK = 16, GQA = 0, KDA = 1, MLA = 2, DENSE = 0, ROUTED = 1 };

typedef struct {
  I kind, F, ffn;                                                       /* F: of the dense or shared feed-forward */
  const float *ln1, *ln2, *gate, *up, *down, *gate_b, *up_b, *down_b;   /* norms and feed-forward */
  const float *q, *k, *v, *o, *q_b, *k_b, *v_b, *o_b, *q_norm, *k_norm; /* gqa; kda uses q, k, v, o */
  const float *g, *g_a, *f_a, *f_b, *beta, *decay, *dt, *q_conv, *k_conv, *v_conv, *o_norm; /* kda; mla uses g, o */
  const float *q_a, *q_a_norm, *q_bb, *kv_a, *kv_a_norm, *kv_b; /* mla; q alone where queries are direct */
  const float *router, *bias, *w1, *w3, *w2, *latent_down, *latent_up, *latent_norm; /* routed experts */
  const float *mix1, *mix1_norm, *mix2, *mix2_norm;                                  /* attention-residual sites */
  float *pool, *pool2; /* gqa: k, v; kda: matrix, tail; mla: latent, - */
} Layer;

typedef struct {
  I layers, D, situ, W, H, residual;       /* residual: layers per attention-residual block, 0 for the ordinary kind */
  I G, K;                                  /* gqa: key heads, head width */
  I KK, kernel, rank, gate_rank, softplus; /* kda: head width, convolution taps, decay rank, gate rank, kind of decay */
  I q_rank, R, nope, extra, VD;            /* mla: query rank, latent rank, key parts, value width */
  I E, top_k, EF, L, renormalise, input_format, rule; /* experts: how many, chosen, width, what they read; quant.h */
  float eps, mla_eps, b1, b2, lower, scale;
  const float *norm, *head, *mix, *mix_norm;
} Model;

/* Where B rows stand: filled positions, pages (B tables of `width`), KDA slots; cos, signed sin [B][K] or null. */
typedef struct {
  I B, width;
  const I *lengths, *tables, *slots;
  const float *cos, *sin;
} Rows;

static inline const I *table_of(const Rows *r, I b) { return r->tables + b * r->width; }

static inline V activate(const Model *m, V gate, V up) {
  if (m->situ) return m->b1 * vtanh(gate / m->b1) * vsigmoid(gate) * m->b2 * vtanh(up / m->b2);
  return gate * vsigmoid(gate) * up;
}

#endif
