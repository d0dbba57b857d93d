// The functions every template may call: Jinja's own and the two that transformers adds.
#include <algorithm>
#include <array>

#include "formats/jinja_eval.h"

namespace dspark::formats::jinja {

namespace {

constexpr int64_t kMaxRange = 100000;  // as in Jinja's sandbox

Value make_range(Interp&, const Args& args) {
  const Params params("range", args, {"start", "stop", "step"}, 1);
  if (!args.keywords.empty()) type_error("range() takes no keyword arguments");
  const auto number = [&](size_t i) {
    require_defined(*params[i]);
    return to_index(*params[i]);
  };
  const auto range = std::make_shared<Range>();
  range->stop = number(0);
  if (params[1]) range->start = range->stop, range->stop = number(1);
  if (params[2]) range->step = number(2);
  if (range->step == 0) value_error("range() arg 3 must not be zero");
  const Int span = range->step > 0 ? Int(range->stop) - range->start : Int(range->start) - range->stop;
  const Int step = range->step > 0 ? Int(range->step) : -Int(range->step);
  const Int size = span <= 0 ? 0 : (span + step - 1) / step;
  if (size > kMaxRange)
    throw PyError("OverflowError", "Range too big. The sandbox blocks ranges larger than MAX_RANGE (100000).");
  range->size = static_cast<int64_t>(size);
  return Value::object(Type::range, range);
}

// dict(mapping or pairs, key=value, ...)
std::shared_ptr<Dict> collect(Interp& interp, const Args& args) {
  if (args.positional.size() > 1) type_error("dict expected at most 1 argument, got {}", args.positional.size());
  const auto dict = std::make_shared<Dict>();
  if (!args.positional.empty()) {
    const Value& source = args.positional[0];
    if (source.is(Type::dict)) {
      for (const auto& [key, value] : source.as<Dict>().entries) dict_set(*dict, key, value, interp.meter);
    } else {
      size_t index = 0;
      for (const Value& pair : iterate(source, interp.meter)) {
        if (!is_iterable(pair)) type_error("cannot convert dictionary update sequence element #{} to a sequence", index);
        const Values parts = iterate(pair, interp.meter);
        if (parts.size() != 2)
          value_error("dictionary update sequence element #{} has length {}; 2 is required", index, parts.size());
        dict_set(*dict, parts[0], parts[1], interp.meter);
        ++index;
      }
    }
  }
  for (const auto& [key, value] : args.keywords) dict_set(*dict, Value::text(key), value, interp.meter);
  return dict;
}

Value make_dict(Interp& interp, const Args& args) { return Value::object(Type::dict, collect(interp, args)); }

Value make_namespace(Interp& interp, const Args& args) {
  const auto dict = collect(interp, args);
  const auto space = interp.make_namespace();
  for (const auto& [key, value] : dict->entries) {
    if (!key.is(Type::text)) unsupported("a namespace with keys that are not strings");
    space->attributes.emplace_back(key.str(), value);
  }
  return Value::object(Type::name_space, space);
}

Value make_cycler(Interp&, const Args& args) {
  if (!args.keywords.empty()) type_error("cycler() takes no keyword arguments");
  if (args.positional.empty()) throw PyError("RuntimeError", "at least one item has to be provided");
  const auto cycler = std::make_shared<Cycler>();
  for (const Value& item : args.positional) nest(*cycler, item);
  cycler->items = args.positional;
  return Value::object(Type::cycler, cycler);
}

Value make_joiner(Interp&, const Args& args) {
  const Params params("joiner", args, {"sep"});
  const auto joiner = std::make_shared<Joiner>();
  joiner->separator = params[0] ? *params[0] : Value::text(", ");
  nest(*joiner, joiner->separator);
  return Value::object(Type::joiner, joiner);
}

Value raise_exception(Interp& interp, const Args& args) {
  const Params params("raise_exception", args, {"message"}, 1);
  throw PyError("raise_exception", interp.text(*params[0]));
}

Value strftime_now(Interp& interp, const Args& args) {
  const Params params("strftime_now", args, {"format"}, 1);
  return Value::text(format_time(params.str(0), interp.now));
}

Value lipsum(Interp&, const Args&) { unsupported("the function 'lipsum'"); }

Function function(const char* name, Value (*call)(Interp&, const Args&)) {
  Function out;
  out.name = name;
  out.call = call;
  return out;
}

}  // namespace

const Function* find_global(std::string_view name) {
  static const std::array<Function, 8> kFunctions = {
      function("range", make_range),          function("dict", make_dict),
      function("namespace", make_namespace),  function("cycler", make_cycler),
      function("joiner", make_joiner),        function("raise_exception", raise_exception),
      function("strftime_now", strftime_now), function("lipsum", lipsum)};
  const auto found = std::find_if(kFunctions.begin(), kFunctions.end(), [&](const auto& f) { return f.name == name; });
  return found == kFunctions.end() ? nullptr : &*found;
}

}  // namespace dspark::formats::jinja
