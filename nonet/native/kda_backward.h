/* Gradients of KDA by hand (names as in kda_chunk.h; dX of a quantity X is the loss's derivative by it).

   Going back over the chunks with D = d(S') of the state behind the chunk:

     du = kt D + A^T do                  dr = (I + diag(beta) X)^-T du        y = beta dr
     dv = y     dbeta_t = dr_t . w_t     dA = lower(do u^T)                   dX = -strictly lower(y u^T)
     d(qh) = do S^T / c + dA kb          d(kh) = -y S^T / c + dX kb
     d(kb) = dA^T qh + dX^T kh           d(kt) = u D^T
     dS = end o D + (qh^T do - kh^T y) / c
     dq = c P o d(qh)                    dk = c P o d(kh) + d(kb) / (c P) + (P_16 / P) o d(kt)
     d(log P) = qh o d(qh) + kh o d(kh) - kb o d(kb) - kt o d(kt); its last row also gets the column sums of
     kt o d(kt) and end o rowsum(D o S). dg is its sum from t to the end of the chunk.

   The forward pass kept w, X, A and the state in front of every KEEP-th chunk; the states between are made again,
   transposed ([V][K]), which is how all products but one want them. */

typedef struct {
  const REAL *q, *k, *g, *beta;
  I q_b, q_t, q_h, k_b, k_t, k_h, g_b, g_t, g_h, beta_b, beta_t, beta_h;
  const I *sequences;
  const REAL *w, *kept;
  const I *first_kept;
  const REAL *d_o;   /* [B][T][H][V] */
  const REAL *d_end; /* [N][H][K][V] or null */
  REAL *dq, *dk, *dv, *dg, *dbeta; /* contiguous; positions of no sequence are not written */
  REAL *d_state;     /* [N][H][K][V] */
  I N, T, H, K, V, threads;
} Backward;

/* A chunk made again: prepared rows, u, and the state in front of it, transposed. */
typedef struct {
  Chunk c;
  REAL *u; /* [16][V] */
  REAL *S; /* [V][K], panelled */
} Again;

/* What one chunk's backward pass writes on; [16] stands for positions. */
typedef struct {
  REAL *turned; /* [max(K, V)][16] */
  REAL *rows;   /* [32][V]: -y, then do */
  REAL *du;     /* [16][PANEL] */
  REAL *scaled; /* [32][PANEL] */
  REAL *dxa;    /* [32][16]: dX, dA; then transposed in `dxa_t` [16][32] */
  REAL *dxa_t;
  REAL *through, *within; /* [32][K]: rows S^T;  dX kb, dA kb */
  REAL *dkb, *dkt;        /* [16][K] */
  REAL *D, *D_t; /* D [K][V] and its transpose, panelled */
  REAL *dend;   /* [K] */
  REAL *pad;    /* [3][16][K] + [2][16][V]: a last chunk filled up, and its gradients */
  REAL dbeta[CHUNK];
} Work;

/* Where a chunk's w is read and its gradients go: rows in memory, or in m->pad for a chunk that is not full. */
typedef struct {
  const REAL *w;
  REAL *dq, *dk, *dg, *dv;
  I ks, vs;
} Ends;

static I again_room(I K, I n) { return CHUNK_ROWS * K + 2 * CHUNK * CHUNK + CHUNK * n + panelled(n, K); }
static I work_room(I K, I n) {
  return CHUNK * (K > n ? K : n) + 3 * CHUNK * PANEL + 4 * CHUNK * n + 4 * CHUNK * CHUNK + 9 * CHUNK * K + K +
         panelled(K, n) + panelled(n, K);
}

static REAL *lay_out_again(Again *a, REAL *at, I K, I n) {
  a->u = lay_out(&a->c, at, K, 1);
  a->S = a->u + CHUNK * n;
  return a->S + panelled(n, K);
}

static void lay_out_work(Work *m, REAL *at, I K, I n) {
  m->turned = at;
  m->rows = m->turned + CHUNK * (K > n ? K : n);
  m->du = m->rows + 2 * CHUNK * n;
  m->scaled = m->du + CHUNK * PANEL;
  m->dxa = m->scaled + 2 * CHUNK * PANEL;
  m->dxa_t = m->dxa + 2 * CHUNK * CHUNK;
  m->through = m->dxa_t + 2 * CHUNK * CHUNK;
  m->within = m->through + 2 * CHUNK * K;
  m->dkb = m->within + 2 * CHUNK * K;
  m->dkt = m->dkb + CHUNK * K;
  m->pad = m->dkt + CHUNK * K;
  m->dend = m->pad + 3 * CHUNK * K + 2 * CHUNK * n;
  m->D = m->dend + K;
  m->D_t = m->D + panelled(K, n);
}

/* One vector of columns: du += A^T do, then dr, y (negated into rows) and dv. part: dr . w, lane by lane. scaled
   [32][PANEL]: rows / c. */
static INLINE void column_back(const Chunk *c, REAL *rows, const REAL *du, REAL *scaled, const REAL *w, REAL *dv,
                               I vs, V *part, I n) {
  V t[CHUNK];
#pragma GCC unroll 16
  for (int j = 0; j < CHUNK; j++) t[j] = load(du + j * PANEL);
#pragma GCC unroll 16
  for (int i = 0; i < CHUNK; i++) {
    V d = load(rows + (CHUNK + i) * n);
    store(scaled + (CHUNK + i) * PANEL, d * UNSHIFT);
#pragma GCC unroll 16
    for (int j = 0; j < CHUNK; j++)
      if (j <= i) t[j] += c->xa[(CHUNK + i) * CHUNK + j] * d;
  }
#pragma GCC unroll 16
  for (int i = CHUNK - 1; i >= 0; i--) {
    part[i] += t[i] * load(w + i * vs);
    t[i] *= c->beta[i];
    store(dv + i * vs, t[i]);
    store(rows + i * n, -t[i]);
    store(scaled + i * PANEL, t[i] * -UNSHIFT);
#pragma GCC unroll 16
    for (int j = 0; j < CHUNK; j++)
      if (j < i) t[j] -= c->xa[i * CHUNK + j] * t[i];
  }
}

/* From D to dS in place, a panel at a time; on the way y, dv, dbeta, and D transposed. */
static void retreat(const Chunk *c, Work *m, const Ends *e, I K, I n) {
  V part[CHUNK];
  memset(part, 0, sizeof part);
  REAL *D = m->D;
  for (I j = 0; j < n; j += PANEL, D += K * PANEL) {
    const I wide = width_at(j, n);
    product(c->kt, K, D, PANEL, 0, K, m->du, PANEL, CHUNK, wide);
    for (I i = 0; i < wide; i += LANES)
      column_back(c, m->rows + j + i, m->du + i, m->scaled + i, e->w + j + i, e->dv + j + i, e->vs, part, n);
    transpose_panel(D, m->D_t, K, j, wide, n);
    update(D, D, c->end, c->kh, K, m->scaled, PANEL, 2 * CHUNK, K, wide);
  }
  for (int i = 0; i < CHUNK; i++) m->dbeta[i] = sum(part[i]);
}

/* dX and dA, with zeros above. */
static void triangles_back(const Again *a, Work *m, I n) {
  transpose(a->u, n, m->turned, CHUNK, CHUNK, n);
  product(m->rows, n, m->turned, CHUNK, PANEL, n, m->dxa, CHUNK, 2 * CHUNK, CHUNK);
  for (int i = 0; i < CHUNK; i++)
    for (int j = i; j < CHUNK; j++) {
      m->dxa[i * CHUNK + j] = 0;
      if (j > i) m->dxa[(CHUNK + i) * CHUNK + j] = 0;
    }
}

/* dq, dk and dg of one vector of key channels, from d(qh), d(kh), d(kb), d(kt) and d(end). */
static INLINE void gather_back(const Again *a, const Work *m, const Ends *e, I K, I i) {
  const Chunk *c = &a->c;
  const REAL *dh = c->dh + i, *kh = c->kh + i, *kb = c->kb + i, *kt = c->kt + i, *through = m->through + i;
  const REAL *within = m->within + i, *dkb = m->dkb + i, *dkt = m->dkt + i;
  REAL *dq = e->dq + i, *dk = e->dk + i, *dg = e->dg + i;
  const I ks = e->ks, below = CHUNK * K;
  const V last = load(dh + (CHUNK - 1) * K);
  V at_end = load(c->end + i) * load(m->dend + i), run = {0}, log_p[CHUNK];
#pragma GCC unroll 2
  for (int t = 0; t < CHUNK; t++, dh += K, kh += K, kb += K, kt += K, through += K, within += K, dkb += K, dkt += K) {
    V d = load(dh), inverse = (REAL)1 / d, by_kt = load(dkt), by_kb = load(dkb), tail = load(kt) * by_kt;
    V by_kh = load(through) * UNSHIFT + load(within), by_qh = load(through + below) * UNSHIFT + load(within + below);
    store(dq + t * ks, d * by_qh);
    store(dk + t * ks, d * by_kh + inverse * by_kb + last * inverse * by_kt);
    log_p[t] = load(kh + below) * by_qh + load(kh) * by_kh - load(kb) * by_kb - tail;
    at_end += tail;
  }
  log_p[CHUNK - 1] += at_end;
  for (int t = CHUNK - 1; t >= 0; t--) {
    run += log_p[t];
    store(dg + t * ks, run);
  }
}

/* One chunk: the do half of m->rows is filled; m->D is d(S') and becomes dS. */
static void chunk_back(Again *a, Work *m, const Ends *e, I K, I n) {
  Chunk *c = &a->c;
  retreat(c, m, e, K, n);
  triangles_back(a, m, n);
  product(m->dxa, CHUNK, c->kb, K, PANEL, CHUNK, m->within, K, 2 * CHUNK, K);
  transpose(m->dxa, CHUNK, m->dxa_t, 2 * CHUNK, 2 * CHUNK, CHUNK);
  product(m->dxa_t, 2 * CHUNK, c->kh, K, PANEL, 2 * CHUNK, m->dkb, K, CHUNK, K);
  for (I j = 0; j < K; j += PANEL) { /* all that reads these columns of S and D: they fit the first cache */
    const REAL *S = a->S + j * n, *D = m->D_t + j * n;
    const I wide = width_at(j, K);
    product(m->rows, n, S, PANEL, 0, n, m->through + j, K, 2 * CHUNK, wide);
    product(a->u, n, D, PANEL, 0, n, m->dkt + j, K, CHUNK, wide);
    for (I i = 0; i < wide; i += LANES) {
      V s[4] = {{0}};
      for (I v = 0; v < n; v += 4)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) s[k] += load(D + (v + k) * PANEL + i) * load(S + (v + k) * PANEL + i);
      store(m->dend + j + i, (s[0] + s[1]) + (s[2] + s[3]));
      gather_back(a, m, e, K, j + i);
    }
  }
}

/* Prepare the chunk at position `at` again, and u from w; w and its do go to `m` when it is their turn. */
static void chunk_again(const Backward *f, Again *a, Work *m, I row, I h, I at, I have, I ahead) {
  const I K = f->K, n = f->V;
  Rows in = {f->q + row * f->q_b + at * f->q_t + h * f->q_h, f->k + row * f->k_b + at * f->k_t + h * f->k_h, 0,
             f->g + row * f->g_b + at * f->g_t + h * f->g_h, f->q_t, f->k_t, 0, f->g_t, ahead};
  if (have < CHUNK) pad_rows(&in, m->pad, have, K, n);
  prepare(&a->c, &in, K);
  for (I i = 0; i < CHUNK; i++) {
    REAL beta = a->c.beta[i] = i < have ? f->beta[row * f->beta_b + (at + i) * f->beta_t + h * f->beta_h] : 0;
    const REAL *w = f->w + ((row * f->T + at + i) * f->H + h) * n;
    const REAL *d_o = f->d_o + (w - f->w);
    for (I j = 0; j < n; j++) a->u[i * n + j] = i < have ? beta * w[j] : 0;
    for (I j = 0; j < n; j += LANES) {
      fetch(d_o + j);
      fetch_to_write(f->dv + (w - f->w) + j);
      fetch(w + ahead * f->H * n + j);
    }
    const I place = ((row * f->T + at + i) * f->H + h) * K;
    for (I j = 0; j < K; j += LANES) {
      fetch_to_write(f->dq + place + j);
      fetch_to_write(f->dk + place + j);
      fetch_to_write(f->dg + place + j);
    }
  }
}

/* Gradients of a chunk that is not full, from where chunk_back left them to where they belong. */
static void hand_out(const Ends *from, const Ends *to, I have, I K, I n) {
  for (I i = 0; i < have; i++) {
    memcpy(to->dv + i * to->vs, from->dv + i * from->vs, n * sizeof(REAL));
    memcpy(to->dq + i * to->ks, from->dq + i * from->ks, K * sizeof(REAL));
    memcpy(to->dk + i * to->ks, from->dk + i * from->ks, K * sizeof(REAL));
    memcpy(to->dg + i * to->ks, from->dg + i * from->ks, K * sizeof(REAL));
  }
}

static void backward_head(const Backward *f, I n, I h, REAL *room) {
  const I K = f->K, n_v = f->V, size = K * n_v, row = f->sequences[3 * n], begin = f->sequences[3 * n + 1];
  const I count = f->sequences[3 * n + 2], chunks = (count + CHUNK - 1) / CHUNK, block = kept_size(K, n_v);
  const I ks = f->H * K, vs = f->H * n_v;
  Again again[KEEP];
  Work m;
  for (int i = 0; i < KEEP; i++) room = lay_out_again(again + i, room, K, n_v);
  lay_out_work(&m, room, K, n_v);
  if (f->d_end) pack(f->d_end + (n * f->H + h) * size, m.D, K, n_v);
  else memset(m.D, 0, panelled(K, n_v) * sizeof(REAL));
  for (I first = (chunks - 1) / KEEP * KEEP; first >= 0 && chunks; first -= KEEP) {
    const I here = chunks - first < KEEP ? chunks - first : KEEP;
    const REAL *kept = f->kept + ((f->first_kept[n] + first / KEEP) * f->H + h) * block;
    for (I j = 0; j < n_v; j += PANEL) transpose_panel(kept + j * K, again[0].S, K, j, width_at(j, n_v), n_v);
    for (I i = 0; i < here; i++) {
      Again *a = again + i;
      const I t = (first + i) * CHUNK, have = count - t < CHUNK ? count - t : CHUNK;
      chunk_again(f, a, &m, row, h, begin + t, have, i + 1 < here ? CHUNK : -(here + KEEP - 1) * CHUNK);
      memcpy(a->c.xa, kept + panelled(K, n_v) + i * TRIANGLES, TRIANGLES * sizeof(REAL));
      for (I j = 0; j < K && i + 1 < here; j += PANEL)
        update_columns(again[i + 1].S + j * n_v, a->S + j * n_v, a->c.end + j, a->u, n_v, a->c.kt + j, K, CHUNK, n_v,
                       width_at(j, K));
    }
    for (I i = here - 1; i >= 0; i--) {
      const I t = (first + i) * CHUNK, have = count - t < CHUNK ? count - t : CHUNK, at = begin + t;
      const I place = (row * f->T + at) * f->H + h;
      const Ends outside = {f->w + place * n_v, f->dq + place * K, f->dk + place * K, f->dg + place * K,
                            f->dv + place * n_v, ks, vs};
      if (first)
        for (I j = i * block / KEEP; j < (i + 1) * block / KEEP; j += LANES) fetch(kept - f->H * block + j);
      padded(m.rows + CHUNK * n_v, f->d_o + place * n_v, vs, have, n_v);
      if (have == CHUNK) chunk_back(again + i, &m, &outside, K, n_v);
      else {
        REAL *dv = m.pad + 3 * CHUNK * K, *w = dv + CHUNK * n_v;
        const Ends inside = {padded(w, outside.w, vs, have, n_v), m.pad, m.pad + CHUNK * K, m.pad + 2 * CHUNK * K, dv,
                             K, n_v};
        chunk_back(again + i, &m, &inside, K, n_v);
        hand_out(&inside, &outside, have, K, n_v);
      }
      for (I t = 0; t < have; t++) f->dbeta[place + t * f->H] = m.dbeta[t];
    }
  }
  unpack(m.D, f->d_state + (n * f->H + h) * size, K, n_v);
}

/* Returns 0, or 1 when memory ran out. */
int NAME(kda_backward)(const Backward *f) {
  const I items = f->N * f->H;
  int failed = 0;
#pragma omp parallel num_threads(f->threads < items ? f->threads : items) if (f->threads > 1 && items > 1)
  {
    unsigned before = flush_denormals();
    REAL *room = scratch(KEEP * again_room(f->K, f->V) + work_room(f->K, f->V));
    if (!room) failed = 1;
#pragma omp for schedule(dynamic)
    for (I i = 0; i < items; i++)
      if (room) backward_head(f, i / f->H, i % f->H, room);
    free(room);
    restore(before);
  }
  return failed;
}
