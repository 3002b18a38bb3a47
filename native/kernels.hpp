// The interface between api.cpp and the kernels of each instruction set: plain structs with the arguments of each
// kernel, and a table of function pointers (Kernels). api.cpp has checked all sizes and indices, except the lists of
// Gather.
#pragma once

#include <cstddef>
#include <cstdint>

#include "element.hpp"

namespace attendless {

// A tensor [batch, heads, tokens, channels] with strides in elements; the stride of the channels is 1. Kernels read and
// write f32. In a forward pass, q, k, v and out may also be bf16; attendless.sparse.table lists the types.
struct View {
  void* data;
  int64_t batch, head, token;
  int width;
  Element element = Element::f32;
};

// Groups of integers in CSR form: group g of `count` holds member[start[g]] … member[start[g + 1] - 1].
struct Groups {
  int count;
  const int32_t* start;
  const int32_t* member;
};

// The arguments that every attention over lists of keys has. The data pointers of gradients are null in the forward
// pass.
struct Problem {
  int batch, heads, tokens, threads;
  float scale;
  View q, k, v, out;
  const float* bias;  // [batch, tokens]: added to the scores of each key; or null
  float* lse;         // [batch, heads, tokens]: log Σ exp of the scores of each query
  View out_grad, q_grad, k_grad, v_grad;
  float* bias_grad;  // [batch, heads, tokens], or null
  bool repeats;      // backward pass: a shared list may name a key more than once
};

// The grid of one image: the tokens of each cell and of each tile, without prefix tokens.
struct Image {
  Groups cells, tiles;
};

struct Foveal {
  Problem problem;
  int prefix, budget;
  int order;           // 1: add the first-order correction of the averaged cells
  bool bytes;          // QKᵀ in int8; values are bf16
  const Image* image;  // [images]; images is 1 (shared) or the batch size
  int images;
  Groups parents;     // the cells of each coarse cell; no groups if there is one level of averaging
  const int32_t* parent;  // the coarse cell of each cell
  Groups own;         // the cells that each tile covers: always chosen
  int32_t* chosen;    // [batch, heads, tiles, budget], ascending: written if `select`, otherwise read; null: the caller
                      // does not need the choice
  bool select, attend;  // choose cells; attend to them
};

struct Block {
  Problem problem;
  Groups queries;  // the queries of each tile
  Groups keys;     // the key list of each tile: [tiles] if shared by all heads, otherwise [heads, tiles]
};

struct Gather {
  Problem problem;
  const int32_t* indices;  // [batch, heads, tokens, longest]: the keys of each query
  const int32_t* counts;   // [batch, heads, tokens]: the first `counts` keys are used; null: all
  int longest;
  int32_t* wrong;  // set to 1 if an index is not a token or a count is out of range
};

// Each query attends to the keys with the largest connectivity; connectivity = coefficients × basis.
struct Sparsifiner {
  // A table for all images (`image` = 0), or one per image, `image` numbers apart.
  struct Table {
    const float* data;
    int64_t image;
    const float* of(int index) const { return data + index * image; }
  };
  Problem problem;
  int budget, prefix;
  float tau;          // coefficients ≤ tau count as 0
  int top;            // only the `top` largest coefficients count; 0: all
  View coefficients;  // [batch, heads, tokens, ranks]
  Table basis;        // [ranks, tokens]: the connectivity of each rank with each token
  View tail_scores, tail_values;  // [batch, heads, tokens, ranks] and [batch, heads, ranks, channels]
  Table share;        // [tokens, ranks]: the share of each key in the tail of each rank; null: no tail
  int32_t* indices;   // [batch, heads, tokens, budget]: only choose keys; null: attend
  int32_t* counts;    // [batch, heads, tokens]
};

// A tensor [batch, tokens, channels] with strides in floats; the stride of the channels is 1.
struct Rows {
  float* data;
  int64_t batch, token;
  int width;
};

// Token merging: `sources` patches of each image are matched with the other patches, and `merged` of them are averaged
// into their match.
struct Merge {
  int batch, threads;
  int height, width;  // size of the grid
  int prefix, patches, merged, sources;
  bool by_importance;  // the sources are the least important patches; otherwise every second patch
  int window;  // side in patches of the window that source and target must share; 0: no windows
  float protect;
  Rows x, out;
  View keys;  // [batch, heads, tokens, channels]: similarity is the cosine of the keys summed over the heads
  int heads;
  const float* importance;  // [batch, tokens], or null
  const float* sizes;       // [batch, patches]: how many patches each token represents; null: 1
  const int64_t* cells;     // [batch, patches]: the grid position of each token; null: its index
  const int64_t* owners;    // [batch, positions]: the token that represents each grid position, or -1; null: derived
                            // from `cells`
  float* sizes_out;         // sizes, cells and owners of the remaining tokens
  int64_t *cells_out, *owners_out;
};

// The kernels of one instruction set.
struct Kernels {
  const char* name;
  void (*foveal)(const Foveal&);
  void (*foveal_backward)(const Foveal&);
  void (*block)(const Block&);
  void (*block_backward)(const Block&);
  void (*gather)(const Gather&);
  void (*gather_backward)(const Gather&);
  void (*sparsifiner)(const Sparsifiner&);
  void (*merge)(const Merge&);
  void (*exp2)(const float* from, float* to, int64_t count);
};

}  // namespace attendless
