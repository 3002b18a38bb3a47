// What may be asked of the kernels, whoever asks: Python by module.cpp, other runtimes by operators.hpp. Every argument
// is checked whole before a kernel reads it; std::invalid_argument says what is wrong. Results are written where the caller
// wants them.
#pragma once

#include <optional>

#include "arguments.hpp"

namespace attendless {

void foveal_select(const AnyHeads& q, const AnyHeads& k, const std::optional<Bias>& bias,
                   const std::optional<Places>& places, const Numbers& layout, float scale, int threads,
                   const Chosen& chosen);
void foveal_attend(const AnyHeads& q, const AnyHeads& k, const AnyHeads& v, const std::optional<Bias>& bias,
                   const std::optional<Places>& places, const Numbers& layout, float scale, int threads,
                   const std::optional<Chosen>& chosen, bool select, const AnyHeads& out, const Lse& lse);
void foveal_backward(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                     const std::optional<Places>& places, const Numbers& layout, float scale, int threads,
                     const Chosen& chosen, const Heads& out, const Lse& lse, const Heads& out_grad,
                     const Heads& q_grad, const Heads& k_grad, const Heads& v_grad,
                     const std::optional<Lse>& bias_grad);
void block_attend(const AnyHeads& q, const AnyHeads& k, const AnyHeads& v, const std::optional<Bias>& bias,
                  const Indices& query_start, const Indices& queries, const Indices& key_start, const Indices& keys,
                  float scale, int threads, const AnyHeads& out, const Lse& lse);
void block_backward(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                    const Indices& query_start, const Indices& queries, const Indices& key_start, const Indices& keys,
                    float scale, int threads, const Heads& out, const Lse& lse, const Heads& out_grad,
                    const Heads& q_grad, const Heads& k_grad, const Heads& v_grad,
                    const std::optional<Lse>& bias_grad);
void gather_attend(const AnyHeads& q, const AnyHeads& k, const AnyHeads& v, const std::optional<Bias>& bias,
                   const Chosen& indices, const std::optional<Counts>& counts, float scale, int threads,
                   const AnyHeads& out, const Lse& lse);
void gather_backward(const Heads& q, const Heads& k, const Heads& v, const std::optional<Bias>& bias,
                     const Chosen& indices, const std::optional<Counts>& counts, float scale, int threads,
                     const Heads& out, const Lse& lse, const Heads& out_grad, const Heads& q_grad,
                     const Heads& k_grad, const Heads& v_grad, const std::optional<Lse>& bias_grad);
void sparsifiner_select(const Heads& coefficients, const Tables& basis, int64_t budget, int64_t prefix, float tau,
                        int64_t top, int threads, const Chosen& indices, const Counts& counts);
void sparsifiner(const AnyHeads& q, const AnyHeads& k, const AnyHeads& v, const std::optional<Bias>& bias,
                 const Heads& coefficients, const Tables& basis, const std::optional<Heads>& tail_scores,
                 const std::optional<Heads>& tail_values, const std::optional<Tables>& share, int64_t budget,
                 int64_t prefix, float tau, int64_t top, float scale, int threads, const AnyHeads& out,
                 const Lse& lse);
void merge(const Tokens& x, const Heads& keys, const std::optional<Bias>& importance,
           const std::optional<Bias>& sizes, const std::optional<Longs>& cells, const std::optional<Longs>& owners,
           const Merging& plan, float protect, int threads, const Tokens& out, const Bias& sizes_out,
           const Longs& cells_out, const Longs& owners_out);

}  // namespace attendless
