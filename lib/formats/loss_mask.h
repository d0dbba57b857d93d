// Loss masks: which tokens of a conversation the model itself would have written.
//
// A mask is 1 for every token that lies wholly inside an answer, and an answer is an assistant turn from where the
// template's generation prompt ends to the end of its end-of-turn token: not the header, not the newline after it, no
// other role whatever its text looks like. Thinking and tool calls that the template writes into the turn are part of
// the answer. It is found by rendering, never by searching for markers: the conversation up to the turn with a
// generation prompt gives the beginning, the conversation with the turn gives the end.
//
// When a template changes earlier turns (it drops thinking, say), rendering a part does not give a part of the whole.
// Such conversations become one row per answer, rendered up to that answer, only that answer in the loss.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/json.h"
#include "formats/chat_template.h"
#include "formats/rows.h"
#include "formats/tokenizer.h"

namespace dspark::formats {

// The chat template: messages (a JSON list) and tools (or null) to text. Throws Error when it refuses them.
using Render =
    std::function<std::string(const OrderedJson& messages, const OrderedJson* tools, bool add_generation_prompt)>;

// A target's own template with its tokenizer's bos and eos. Both must outlive the result. `options` adds what the
// command line says (variables, the clock); its generation prompt, tools and tokens are set here.
Render chat_renderer(const ChatTemplate& chat, const Tokenizer& tokenizer, ChatOptions options = {});

struct RenderedRow {
  std::string text;
  std::vector<std::pair<size_t, size_t>> answers;  // byte ranges of `text`, ascending
  int64_t turn = -1;  // the message that is the answer, when the conversation was split; else -1
};
std::vector<RenderedRow> render_conversation(const OrderedJson& messages, const OrderedJson* tools,
                                             const Render& render, const Tokenizer& tokenizer);

struct TokenRow {
  std::vector<int32_t> ids;
  std::vector<uint8_t> mask;  // 1: in the loss
  std::string id;             // row_id of the two: for resuming and against duplicates
  std::string where;          // the line it comes from
  int64_t turn = -1;          // as in RenderedRow
  uint64_t conversation = 0;  // conversation_id of the row it was made from, before any cut
};
// `borders`, when given, grows by the answer borders that fall inside a token.
TokenRow mask_tokens(const RenderedRow& row, const Tokenizer& tokenizer, uint64_t* borders = nullptr);

// The first 16 hex digits of the SHA-256 over the ids (32-bit little-endian) and the mask (bytes).
std::string row_id(std::span<const int32_t> ids, std::span<const uint8_t> mask);

struct MaskOptions {
  int64_t max_length = 0;  // tokens; longer rows are cut. 0: no limit
  bool strict = false;     // what would be counted is an Error
};
// All token rows of one row, counted in `report`; none when it can't be used (the report says why). Prompts have none.
std::vector<TokenRow> make_token_rows(const Row& row, const Tokenizer& tokenizer, const Render& render,
                                      const MaskOptions& options, RowReport& report);

// The ids the model is given to write the next answer.
std::vector<int32_t> prompt_ids(const OrderedJson& messages, const OrderedJson* tools, const Render& render,
                                const Tokenizer& tokenizer);

}  // namespace dspark::formats
