// A whole target as one op: tokens to states, and to the tokens that follow them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/custom_class.h>

#include <optional>
#include <tuple>
#include <vector>

#include "compact.h"
#include "draw.h"
#include "layers.h"

namespace eagle {

struct Decoder : torch::CustomClassHolder {
  c10::intrusive_ptr<Layers> layers;
  Tensor table;                 // [V, h], embeddings
  Tensor gain;                  // of the final norm
  std::optional<Tensor> output; // packed; none where logits are made elsewhere
  std::optional<Tensor> bias;
  int64_t outputs;

  Decoder(c10::intrusive_ptr<Layers> layers, Tensor table, Tensor gain, std::optional<Tensor> output, std::optional<Tensor> bias,
          int64_t outputs)
      : layers(std::move(layers)), table(std::move(table)), gain(std::move(gain)), output(std::move(output)),
        bias(std::move(bias)), outputs(outputs) {}
};

// Tokens int64 [M] to the states [M, h] behind the final norm, the features [M, taps * h], and where `find`, the target's own
// token behind each row: the greatest, or drawn as `linear_draw` does where temperatures are given.
inline std::tuple<Tensor, Tensor, std::vector<int64_t>> decode(
    const c10::intrusive_ptr<Decoder>& decoder, const Tensor& tokens, const Tensor& positions, const Tensor& places,
    const Tensor& cache, const Tensor& cos, const Tensor& sin, at::IntArrayRef tapped, bool find, at::ArrayRef<double> temperature,
    at::IntArrayRef seed, at::IntArrayRef sample) {
  const Layers& stack = *decoder->layers;
  Tensor ids = tokens.contiguous();
  Tensor x = take_rows(decoder->table, {ids.const_data_ptr<int64_t>(), size_t(ids.numel())});
  Tensor features = at::empty({x.size(0), x.size(1) * int64_t(tapped.size())}, x.options());
  Tensor states = layers(decoder->layers, x, std::nullopt, places, positions, cache, cos, sin, features, tapped);
  states = norm(states, decoder->gain, stack.norm.eps, stack.norm.kind);
  if (!find) return {states, features, {}};
  TORCH_CHECK(decoder->output, "tokens are not found without an output layer");
  if (temperature.empty())
    return {states, features, linear_argmax(states, *decoder->output, decoder->bias, decoder->outputs)};
  Tensor at = positions.contiguous();
  std::vector<int64_t> behind(at.const_data_ptr<int64_t>(), at.const_data_ptr<int64_t>() + at.numel());
  for (int64_t& position : behind) ++position;
  return {states, features,
          linear_draw(states, *decoder->output, decoder->bias, decoder->outputs, temperature, seed, sample, behind)};
}

}  // namespace eagle
