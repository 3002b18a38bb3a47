// The interface between api.cpp and the kernels of each instruction set: plain structs, no code.
#pragma once

#include <cstddef>
#include <cstdint>

#include "element.hpp"

namespace attendless {

// A [batch, heads, tokens, channels] tensor of any strides (in elements) but the last, which is 1. Kernels read and write
// f32; in a forward pass q, k, v and out may also be bf16. attendless.sparse.table says which.
struct View {
  void* data;
  int64_t batch, head, token;
  int width;
  Element element = Element::f32;
};

// Members of each of `count` groups, one after the other: group g holds member[start[g]] … member[start[g + 1] - 1].
struct Groups {
  int count;
  const int32_t* start;
  const int32_t* member;
};

// The part that every attention over lists of keys has. Gradients are null in the forward pass.
struct Problem {
  int batch, heads, tokens, threads;
  float scale;
  View q, k, v, out;
  const float* bias;  // [batch, tokens], added to every score of a key, or null
  float* lse;         // [batch, heads, tokens]: log Σ exp of each query's scores
  View out_grad, q_grad, k_grad, v_grad;
  float* bias_grad;  // [batch, heads, tokens], or null
  bool repeats;      // a list that queries share may name a key more than once; the backward pass depends on it
};

// One image's grid: the tokens of each cell and of each tile. Prefix tokens are in neither.
struct Image {
  Groups cells, tiles;
};

struct Foveal {
  Problem problem;
  int prefix, budget;
  int order;           // 1: add the first-order correction of the blurred cells
  bool bytes;          // scores are products of bytes; values are bf16
  const Image* image;  // one per image of the batch, or one for all
  int images;
  Groups parents;     // the cells of each coarse cell; none if there is one level
  const int32_t* parent;  // the coarse cell of each cell
  Groups own;         // the cells each tile covers
  int32_t* chosen;    // [batch, heads, tiles, budget], ascending: written by `select`, read by `attend` and backward;
                      // null: the caller does not need it
  bool select, attend;
};

struct Block {
  Problem problem;
  Groups queries;  // of each tile
  Groups keys;     // of each tile, the same for every head, or of each head's tiles, one head after the other
};

struct Gather {
  Problem problem;
  const int32_t* indices;  // [batch, heads, tokens, longest]: the keys of each query
  const int32_t* counts;   // [batch, heads, tokens]: how many of them count, the first ones; null: all
  int longest;
  int32_t* wrong;  // set if an index is no token, or a count no number of keys
};

// Each query has a list of keys of its own: those with the largest connectivity, which is coefficients × basis.
struct Sparsifiner {
  // A table of numbers: the same for all images, or another for each, which begins `image` numbers after the last one.
  struct Table {
    const float* data;
    int64_t image;
    const float* of(int index) const { return data + index * image; }
  };
  Problem problem;
  int budget, prefix;
  float tau;          // coefficients up to this count as 0
  int top;            // and those smaller than so many others; 0: any number counts
  View coefficients;  // [batch, heads, tokens, ranks]
  Table basis;        // [ranks, tokens]: how much each rank connects to each token
  View tail_scores, tail_values;  // [batch, heads, tokens, ranks] and [batch, heads, ranks, channels]
  Table share;        // [tokens, ranks]: each key's part in each rank's tail; null: there is no tail
  int32_t* indices;   // [batch, heads, tokens, budget], to choose only; null: to attend
  int32_t* counts;    // [batch, heads, tokens]
};

// A [batch, tokens, channels] tensor of any strides (in floats) but the last, which is 1.
struct Rows {
  float* data;
  int64_t batch, token;
  int width;
};

// Token merging: of the patches of each image, `sources` are matched with the others, and `merged` of them join theirs.
struct Merge {
  int batch, threads;
  int height, width;  // of the grid
  int prefix, patches, merged, sources;
  bool by_importance;  // the sources are the least important patches; otherwise every second patch
  int window;  // patches of the grid a side, within which a partner is looked for; 0: anywhere
  float protect;
  Rows x, out;
  View keys;  // [batch, heads, tokens, channels]: compared are their sums over the heads
  int heads;
  const float* importance;  // [batch, tokens], or null
  const float* sizes;       // [batch, patches]: how many patches each token represents; null: 1
  const int64_t* cells;     // [batch, patches]: the place of each token on the grid; null: its index
  const int64_t* owners;    // [batch, cells of the grid]: the token that represents each place, or -1; null: the token there
  float* sizes_out;         // the same for the tokens that remain
  int64_t *cells_out, *owners_out;
};

// One instruction set's functions.
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
