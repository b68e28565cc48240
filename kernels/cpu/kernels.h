// The interface for bindings.cpp: plain pointers and strides (in elements) and no torch headers, so
// that the kernels compile in seconds. `threads` is an upper bound; small calls use fewer.
#pragma once

#include <cstdint>
#include <limits>

namespace llmc {

enum class Dtype { f32, bf16, f16, e4m3, e5m2, i8 };  // the last three: caches only

inline bool is_fp8(Dtype dtype) {
  return dtype == Dtype::e4m3 || dtype == Dtype::e5m2;
}

struct Rows {  // a tensor as rows with a contiguous last dimension and up to three outer dimensions
  void* data;
  int64_t size[3];
  int64_t stride[3];
};

struct NormArgs {
  Dtype dtype;
  Rows x, residual;  // residual.data is null for a norm alone
  const void* weight;  // may be null
  void *out, *sum;     // dense; out is null for norm_add
  int64_t width;
  float eps, offset;
  int threads;
  // LayerNorm, otherwise RMSNorm
  bool centered = false;
  const void* bias = nullptr;  // may be null
  // whether x is normalized before it is added to the residual, and by what
  bool norms_x = false;
  const void* x_weight = nullptr;  // may be null
  float x_eps = 0, x_offset = 0;
};

struct GatedNormArgs {
  Rows x, gate;  // of one shape; rows of `width` channels in groups of `group`
  Dtype x_dtype, gate_dtype, weight_dtype, dtype;
  const void* weight;  // [width]; may be null
  void* out;           // dense, of `dtype`
  int64_t width, group;
  float eps, offset;
  bool silu, gate_first;  // the gate is silu(gate), otherwise sigmoid(gate)
  int threads;
};

enum class Act { silu, gelu, gelu_tanh, quick_gelu, relu, relu2 };

struct ActArgs {
  Dtype dtype;
  Act act;
  Rows x;
  void* out;
  int64_t width;  // of the output; input rows are twice as wide, if there is a gate
  int threads;
  float limit = std::numeric_limits<float>::infinity();  // of gates, and magnitudes of the others
  float shift = 0;           // is added to what the gates multiply
  bool interleaved = false;  // gates are not the first half, but the even elements
  bool gated = true;         // otherwise the activation alone
};

struct AddArgs {  // dense
  Dtype dtype;
  const void* x;
  void* out;
  int64_t count;
  int threads;
};

struct RoundArgs {  // dense; `group` inputs share a scale
  Dtype dtype;
  const void* x;
  void* out;
  int64_t count, group;  // group: a multiple of 16
  int threads;
};

struct CopyArgs {  // copies rows to rows of `dtype`; `from` has that dtype or is an FP8 cache
  Dtype dtype, cache;
  float scale;  // factor for FP8 codes
  Rows from, to;
  int64_t width;
  int threads;
};

struct Scales {  // of an FP8 cache: null, one for all heads (stride 0) or one per KV head
  const float *key, *value;
  int64_t key_stride, value_stride;

  float key_of(int64_t head) const { return key ? key[head * key_stride] : 1.0f; }
  float value_of(int64_t head) const { return value ? value[head * value_stride] : 1.0f; }
};

struct WriteArgs {
  Dtype dtype, cache;
  Scales scales;
  const void *key, *value;
  void *key_cache, *value_cache;
  const int64_t* slots;
  int64_t tokens, kv_heads, head_dim, v_dim;
  int64_t block_size;  // tokens; an int8 cache has their scales in further rows behind theirs
  int64_t key_stride[2], value_stride[2];              // token, head
  int64_t key_cache_stride[3], value_cache_stride[3];  // block, head, slot
  int threads;
};

struct Rotation {  // of each token's `width` channels, by rows of tables
  const float *cos, *sin;
  int64_t cos_stride, sin_stride, width;
  const int64_t* positions;  // [T]: the row of each token
  bool interleaved;
};

struct RopeArgs {
  WriteArgs write;
  Rotation rotation;  // of the first channels of a head
  const void *query, *query_norm, *key_norm;  // norms may be null
  bool query_together, key_together;          // all heads are normalized together, by [H D] weights
  void* out;                                  // [T, H, D] dense
  int64_t heads;
  int64_t query_stride[2];
  float eps, norm_offset;
  bool norm_last;  // heads are normalized after their rotation, not before it
};

struct LatentWriteArgs {
  WriteArgs write;           // of one key: `latent`, then `shared`; it has no value
  Rotation rotation;         // of the last channels of a query, and of `shared`
  const void *query, *norm;  // the norm of the latent may be null
  const void *latent, *shared;  // [T, head_dim - width], [T, width]
  void* out;                    // [T, heads, dim] dense
  int64_t heads, dim;
  int64_t query_stride[2], latent_stride, shared_stride;
  float eps, norm_offset;
};

struct ByHead {  // rows of numbers per token and head; data may be null
  const void* data;
  Dtype dtype;        // not FP8
  int64_t stride[2];  // of tokens and of heads
};

struct AttentionArgs {
  Dtype dtype, cache;
  Scales scales;
  const void *query, *key_cache, *value_cache;
  void* out;  // [T, H, Dv] dense
  const int32_t *query_start, *context_len, *block_table;
  int64_t tokens, requests, heads, kv_heads, head_dim, v_dim, block_size;
  int64_t query_stride[2], key_stride[3], value_stride[3], table_stride;
  const float *sinks, *slopes;  // [H] or null; sinks are per token if sink_stride is not 0
  int64_t sink_stride;
  ByHead distance_bias;  // for keys 0, 1, ... positions before the query
  int64_t num_distances;
  const int32_t* chosen;  // [T, 1 or kv_heads, num_chosen] or null; negative: unused
  int64_t num_chosen, chosen_stride[2], sparse_block_size;
  int64_t window, chunk;
  float scale, softcap;
  int threads;
};

struct ChooseArgs {
  Dtype dtype;  // of query, key and cache
  const void *query, *key;
  const float* weights;  // null: each head chooses its own sparse blocks
  void* key_cache;
  const int64_t* slots;
  const int32_t *query_start, *context_len, *block_table;
  int32_t* out;  // [T, top_k], or [T, heads, top_k], dense
  int64_t tokens, requests, heads, head_dim, block_size, top_k, sparse_block_size, recent;
  int64_t rate;  // tokens per key
  int64_t query_stride[2], key_stride, weight_stride, table_stride;
  int64_t cache_stride[2];  // block, slot
  int threads;
};

struct SampleArgs {
  Dtype dtype;
  const void* logits;
  int64_t rows, vocab, logits_stride;
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seed, *position;  // position is not used by sample_rows
  int64_t* out;
  int threads;
};

struct TokenLogprobsArgs {
  Dtype dtype;
  const void* logits;
  int64_t rows, vocab, logits_stride, k;
  const int64_t* token;
  float *chosen, *top_values;  // [S], [S, k]
  int64_t *rank, *top_ids;
  int threads;
};

struct ProcessArgs {
  Dtype dtype;
  const void* logits;
  float* out;  // [S, V] dense
  int64_t rows, vocab, logits_stride;
  const int64_t* row;
  const int32_t *length, *history, *prompt_len;
  int64_t history_stride, history_width;
  const float *repetition, *presence, *frequency;
  const int32_t* repeat_last_n;  // the last tokens that these look at; 0: all
  const int32_t *bias_token, *bias_until;
  const float* bias_value;
  int64_t bias_stride[3], bias_width;  // strides of token, value, until
  const int32_t* has_mask;
  const int32_t* mask;
  int64_t mask_stride;
  int threads;
};

struct LinearArgs {  // all of one dtype; x, weight and out have contiguous last dimensions
  Dtype dtype;
  const void *x, *weight, *bias;  // bias may be null
  void* out;                      // [rows, channels]
  int64_t rows, depth, channels, x_stride, weight_stride, out_stride;
  int threads;
};

struct Products {  // how many there are, and bytes between their matrices
  int64_t count, x_bytes, weight_bytes, out_bytes;
};

// x, a, b and out are contiguous and of one dtype. For routed experts, each slot has `experts` As
// and Bs with one part, and a token's `choices` rows are consecutive; otherwise both are 1.
struct LoraArgs {
  Dtype dtype;
  // [rows, depth], [slots, experts, parts, rank, depth], [slots, experts, rank, channels]
  const void *x, *a, *b;
  void* out;              // [rows, channels], added to
  const int32_t *bounds;  // [parts + 1]: the first channel of each part
  const int32_t *adapter; // [rows / choices]: slot + 1; any other number: no adapter
  const int64_t *expert;  // [rows], or null
  int64_t rows, depth, channels, slots, experts, choices, parts, rank;
  int threads;
};

struct GgufArgs {  // rows of a GGUF file -> the weight inputs of quantized_linear
  int32_t type;          // its number in files
  const uint8_t* rows;   // of blocks, `row_bytes` apart
  int64_t row_bytes;
  const int64_t* order;  // [channels]: the row of each channel; null: they are in order
  int64_t channels, depth;  // multiples of 16, and of the type's block
  uint8_t* weight;
  void *scale, *minimum;  // as stored: no float32; minimum is null if the type has no separate one
};

void gated_rms_norm(const GatedNormArgs&);
void norm(const NormArgs&);
void act_mul(const ActArgs&);
void add_to(const AddArgs&);  // out += x
void round_to_fp8(const RoundArgs&);  // x as e4m3 would hold it, in its own dtype
void copy_rows(const CopyArgs&);
void write_kv(const WriteArgs&);
void rope_write_latent(const LatentWriteArgs&);
void rope_write(const RopeArgs&);
void paged_attention(const AttentionArgs&);
void choose_keys(const ChooseArgs&);
void sample(const SampleArgs&);
void token_logprobs(const TokenLogprobsArgs&);
void process_logits(const ProcessArgs&);
bool takes_linear(const LinearArgs&);  // whether linear() is faster than torch's linear
void linear(const LinearArgs&);
// The same with a weight [depth, channels], as in some checkpoints' stacked experts; weight_stride
// is the stride between inputs.
void linear_columns(const LinearArgs&);
// The arguments are those of the first product.
void linears(const LinearArgs&, const Products&, bool by_columns);
void add_lora(const LoraArgs&);
bool pack_gguf(const GgufArgs&);  // false: the type is not supported

}  // namespace llmc
