/* KDA in float32: the kernels that are used. kda64.c is the same text in float64, for checking. */

#define REAL float
#define REAL_BITS 32
#define NAME(f) f##_f32

#include "kda_vectors.h"

#include "kda_chunk.h"
#include "kda_forward.h"
#include "kda_backward.h"
#include "kda_step.h"
#include "kda_prologue.h"
#include "kda_epilogue.h"
