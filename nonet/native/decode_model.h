/* A model as decoding sees it, by address, and the rows a team carries through it. Names follow
   model/native_decode.py. */

#ifndef NONET_MODEL_H
#define NONET_MODEL_H

#include "attention.h"

/* MOST: rows a team carries at once, or one thread alone (ALONE); MOST_CHOSEN: experts a row may choose. */
enum { GQA = 0, KDA = 1, MLA = 2, DENSE = 0, ROUTED = 1, MOST = 64, ALONE = 16, MOST_CHOSEN = 64 };

typedef struct {
  I kind, F, ffn, reads;          /* F: of the dense or shared feed-forward; reads: width of what q, k and v multiply */
  const float *ln1, *ln2, *gate_b, *up_b, *down_b;                     /* norms and feed-forward */
  const void *gate, *up, *down;
  const void *q, *k, *v, *o;                                           /* gqa; kda uses q, k, v, o */
  const float *q_b, *k_b, *v_b, *o_b, *q_norm, *k_norm;
  const void *g, *g_a, *f_a, *f_b, *beta;                              /* kda; mla uses g, o */
  const float *decay, *dt, *q_conv, *k_conv, *v_conv, *o_norm;
  const void *q_a, *q_bb, *kv_a;                                       /* mla; q alone where queries are direct */
  const float *q_a_norm, *kv_a_norm, *kv_b;
  const void *w1, *w3, *w2, *latent_down, *latent_up, *router;         /* routed experts; the router in float32 */
  const float *bias, *latent_norm;
  const float *mix1, *mix1_norm, *mix2, *mix2_norm;                    /* attention-residual sites */
  float *pool, *pool2;                                              /* gqa: k, v; kda: matrix, tail; mla: latent, - */
} Layer;

typedef struct {
  I layers, D, situ, W, H, residual;       /* residual: layers per attention-residual block, 0 for the ordinary kind */
  I G, K;                                  /* gqa: key heads, head width */
  I KK, kernel, rank, gate_rank, softplus; /* kda: head width, convolution taps, decay rank, gate rank, kind of decay */
  I q_rank, R, nope, extra, VD;            /* mla: query rank, latent rank, key parts, value width */
  I E, top_k, EF, L, renormalise, input_format, rule; /* experts: how many, chosen, width, what they read; quant.h */
  I format, expert_format;                 /* of what is const void *, w1, w3 and w2 apart; the rest is float32 */
  I skip, normed;                          /* a draft's: positions without entry; whether its sum starts normed */
  float eps, mla_eps, b1, b2, lower, scale;
  const float *norm, *mix, *mix_norm, *beside_norm, *stream_norm; /* the last two a draft's, see decode.c */
  const void *head, *join;
} Model;

/* Where B sequences stand that get T tokens each: filled positions, pages (B tables of `width`), KDA slots before the
   first token [B] and after each [B][T]. A row is a token: number b * T + j, behind the others of its sequence.
   cos, signed sin: [B * T][K] or null. features: [B * T][taps][D], what was there after tap[..] layers. beside:
   [B * T][D], the other half of a draft's pairs. */
typedef struct {
  I B, T, width, taps;
  const I *lengths, *tables, *slots, *after;
  const float *cos, *sin;
  const I *tap;
  float *features;
  const float *beside;
} Rows;

/* A row: its sequence's pages; how many positions it sees, its own the last; KDA's slots before and after it. */
typedef struct {
  const I *table;
  I seen, before, after;
} Row;

static void locate(const Rows *where, I first, I rows, Row *out) {
  for (I i = first, b = first / where->T, j = first % where->T; i < first + rows; i++) {
    const I before = j ? where->after[i - 1] : where->slots[b];
    *out++ = (Row){where->tables + b * where->width, where->lengths[b] + j + 1, before, where->after[i]};
    if (++j == where->T) j = 0, b++;
  }
}

/* A team's task: `rows` rows from number `first` on: whole sequences, or a part of one whose earlier tokens have been
   carried before. shared: scratch of all; own: this thread's alone. */
typedef struct {
  Team team;
  const Model *m;
  const Rows *where;
  const Row *row;
  I first, rows;
  float *shared, *own;
} Work;

static inline Matrix weight(const Model *m, const void *at, const float *bias, I N, I K) {
  return (Matrix){at, bias, m->format, N, K};
}

static inline V activate(const Model *m, V gate, V up) {
  if (m->situ) return m->b1 * vtanh(gate / m->b1) * vsigmoid(gate) * m->b2 * vtanh(up / m->b2);
  return gate * vsigmoid(gate) * up;
}

#endif
