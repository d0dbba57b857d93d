// Filters over sequences and mappings.
#include <algorithm>
#include <utility>

#include "formats/jinja_filters.h"
#include "formats/jinja_text.h"

namespace dspark::formats::jinja {

namespace {

// "a.b.0" or 3: the steps of an attribute path.
Values attribute_path(const Value* attribute) {
  Values path;
  if (attribute == nullptr || attribute->is(Type::none)) return path;
  if (!attribute->is(Type::text)) return {*attribute};
  const std::string& text = attribute->str();
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find('.', begin), text.size());
    const std::string part = text.substr(begin, end - begin);
    const bool is_number = !part.empty() && part.size() < 10 &&
                           std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
    path.push_back(is_number ? Value::integer(std::stoi(part)) : Value::text(part));
    begin = end + 1;
  }
  return path;
}

Value follow(Interp& interp, Value item, const Values& path, const Value* otherwise = nullptr) {
  for (const Value& step : path) {
    item = interp.get_item(item, step);
    if (otherwise != nullptr && !otherwise->is(Type::none) && item.is(Type::undefined)) item = *otherwise;
  }
  return item;
}

Value ignore_case(const Value& value, bool case_sensitive) {
  return case_sensitive || !value.is(Type::text) ? value : Value::text(lower(value.str()));
}

struct Keyed {
  Value key, item;
};

void sort_keyed(std::vector<Keyed>& items, bool reverse, Interp& interp) {
  const auto less = [&](const Keyed& a, const Keyed& b) { return compare(a.key, b.key, Order::lt, interp.meter); };
  if (reverse) std::reverse(items.begin(), items.end());
  std::stable_sort(items.begin(), items.end(), less);
  if (reverse) std::reverse(items.begin(), items.end());
}

Value length_filter(Interp&, const Value& value, const Args& args) {
  const Params params("length", args, {});
  return Value::integer(static_cast<Int>(length(value)));
}

Value first(Interp& interp, const Value& value, const Args& args) {
  const Params params("first", args, {});
  if (value.is(Type::iterator)) {
    auto& iterator = value.as<Iterator>();
    if (iterator.pos < iterator.items.size()) return iterator.items[iterator.pos++];
  } else {
    const Values items = iterate(value, interp.meter);
    if (!items.empty()) return items[0];
  }
  return Value::undefined("No first item, sequence was empty.");
}

Value last(Interp& interp, const Value& value, const Args& args) {
  const Params params("last", args, {});
  if (!has_length(value)) type_error("'{}' object is not reversible", type_name(value));
  const Values items = iterate(value, interp.meter);
  return items.empty() ? Value::undefined("No last item, sequence was empty.") : items.back();
}

Value list(Interp& interp, const Value& value, const Args& args) {
  const Params params("list", args, {});
  return Value::list(iterate(value, interp.meter));
}

Value join(Interp& interp, const Value& value, const Args& args) {
  const Params params("join", args, {"d", "attribute"});
  const std::string separator = params[0] ? interp.text(*params[0]) : "";
  const Values path = attribute_path(params[1]);
  std::string out;
  bool first_item = true;
  for (const Value& item : iterate(value, interp.meter)) {
    if (!first_item) {
      interp.meter.bytes(separator.size());
      out += separator;
    }
    first_item = false;
    out += interp.text(follow(interp, item, path));
  }
  return Value::text(std::move(out));
}

Value reverse(Interp& interp, const Value& value, const Args& args) {
  const Params params("reverse", args, {});
  if (value.is(Type::text)) {
    const Value step = Value::integer(-1);
    return slice(value, nullptr, nullptr, &step, interp);
  }
  if (!is_iterable(value)) throw PyError("FilterArgumentError", "argument must be iterable");
  Values items = iterate(value, interp.meter);
  std::reverse(items.begin(), items.end());
  if (value.is(Type::iterator)) return Value::list(std::move(items));
  return Value::iterator(std::move(items), value.is(Type::list) ? "list_reverseiterator" : "reversed");
}

Value sort(Interp& interp, const Value& value, const Args& args) {
  const Params params("sort", args, {"reverse", "case_sensitive", "attribute"});
  const bool case_sensitive = params.flag(1, false);
  std::vector<Values> paths;  // several attributes may be named, with commas
  if (params[2] != nullptr && params[2]->is(Type::text)) {
    const std::string& names = params[2]->str();
    for (size_t begin = 0; begin <= names.size();) {
      const size_t end = std::min(names.find(',', begin), names.size());
      const Value name = Value::text(names.substr(begin, end - begin));
      paths.push_back(attribute_path(&name));
      begin = end + 1;
    }
  } else {
    paths.push_back(attribute_path(params[2]));
  }
  std::vector<Keyed> items;
  for (const Value& item : iterate(value, interp.meter)) {
    Values key;
    for (const Values& path : paths) key.push_back(ignore_case(follow(interp, item, path), case_sensitive));
    items.push_back({Value::list(std::move(key)), item});
  }
  sort_keyed(items, params.flag(0, false), interp);
  Values out;
  for (Keyed& entry : items) out.push_back(std::move(entry.item));
  return Value::list(std::move(out));
}

Value unique(Interp& interp, const Value& value, const Args& args) {
  const Params params("unique", args, {"case_sensitive", "attribute"});
  const Values path = attribute_path(params[1]);
  Values keys, out;
  for (const Value& item : iterate(value, interp.meter)) {
    const Value key = ignore_case(follow(interp, item, path), params.flag(0, false));
    require_hashable(key);
    const bool seen = std::any_of(keys.begin(), keys.end(), [&](const Value& k) { return equal(k, key, interp.meter); });
    if (seen) continue;
    keys.push_back(key);
    out.push_back(item);
  }
  return Value::iterator(std::move(out));
}

Value extreme(Interp& interp, const Value& value, const Args& args, const char* name, Order better) {
  const Params params(name, args, {"case_sensitive", "attribute"});
  const Values path = attribute_path(params[1]);
  Value best, best_key;
  bool any = false;
  for (const Value& item : iterate(value, interp.meter)) {
    const Value key = ignore_case(follow(interp, item, path), params.flag(0, false));
    if (any && !compare(key, best_key, better, interp.meter)) continue;
    best = item;
    best_key = key;
    any = true;
  }
  return any ? best : Value::undefined("No aggregated item, sequence was empty.");
}
Value minimum(Interp& interp, const Value& value, const Args& args) { return extreme(interp, value, args, "min", Order::lt); }
Value maximum(Interp& interp, const Value& value, const Args& args) { return extreme(interp, value, args, "max", Order::gt); }

Value sum(Interp& interp, const Value& value, const Args& args) {
  const Params params("sum", args, {"attribute", "start"});
  const Values path = attribute_path(params[0]);
  Value total = params[1] ? *params[1] : Value::integer(0);
  if (total.is(Type::text)) type_error("sum() can't sum strings [use ''.join(seq) instead]");
  for (const Value& item : iterate(value, interp.meter))
    total = arithmetic(Expr::add, total, follow(interp, item, path), interp);
  return total;
}

Value items(Interp& interp, const Value& value, const Args& args) {
  const Params params("items", args, {});
  if (value.is(Type::undefined)) return Value::iterator({});
  if (!value.is(Type::dict)) type_error("Can only get item pairs from a mapping.");
  return Value::iterator(iterate(call_method(interp, value, "items", {}), interp.meter));
}

Value dictsort(Interp& interp, const Value& value, const Args& args) {
  const Params params("dictsort", args, {"case_sensitive", "by", "reverse"});
  const std::string by = params[1] ? params.str(1) : "key";
  if (by != "key" && by != "value")
    throw PyError("FilterArgumentError", "You can only sort by either \"key\" or \"value\"");
  require_defined(value);
  if (!value.is(Type::dict))
    throw PyError("AttributeError", fmt::format("'{}' object has no attribute 'items'", type_name(value)));
  std::vector<Keyed> entries;
  for (const auto& [key, item] : value.as<Dict>().entries)
    entries.push_back({ignore_case(by == "key" ? key : item, params.flag(0, false)), Value::tuple({key, item})});
  sort_keyed(entries, params.flag(2, false), interp);
  Values out;
  for (Keyed& entry : entries) out.push_back(std::move(entry.item));
  return Value::list(std::move(out));
}

Value groupby(Interp& interp, const Value& value, const Args& args) {
  const Params params("groupby", args, {"attribute", "default", "case_sensitive"}, 1);
  const Values path = attribute_path(params[0]);
  std::vector<Keyed> entries;
  for (const Value& item : iterate(value, interp.meter))
    entries.push_back({ignore_case(follow(interp, item, path, params[1]), params.flag(2, false)), item});
  sort_keyed(entries, false, interp);
  Values groups;
  for (size_t begin = 0, end = 0; begin < entries.size(); begin = end) {
    Values members;
    while (end < entries.size() && equal(entries[end].key, entries[begin].key, interp.meter)) members.push_back(entries[end++].item);
    Value group = Value::tuple({follow(interp, entries[begin].item, path, params[1]), Value::list(std::move(members))});
    group.as<Sequence>().is_group = true;
    groups.push_back(std::move(group));
  }
  return Value::list(std::move(groups));
}

Value batch(Interp& interp, const Value& value, const Args& args) {
  const Params params("batch", args, {"linecount", "fill_with"}, 1);
  const int64_t size = params.integer(0, 0);
  Values out, row;
  const bool fills = params[1] && !params[1]->is(Type::none);
  for (const Value& item : iterate(value, interp.meter)) {
    if (static_cast<int64_t>(row.size()) == size) out.push_back(Value::list(std::exchange(row, {})));
    row.push_back(item);
  }
  if (!row.empty()) {
    if (fills && size > static_cast<int64_t>(row.size())) {
      interp.meter.elements(static_cast<uint64_t>(size));
      row.resize(static_cast<size_t>(size), *params[1]);
    }
    out.push_back(Value::list(std::move(row)));
  }
  return Value::iterator(std::move(out));
}

Value slice_filter(Interp& interp, const Value& value, const Args& args) {
  const Params params("slice", args, {"slices", "fill_with"}, 1);
  const int64_t n_slices = params.integer(0, 0);
  const Values all = iterate(value, interp.meter);
  if (n_slices == 0) throw PyError("ZeroDivisionError", "integer division or modulo by zero");
  if (n_slices < 0) return Value::iterator({});
  interp.meter.elements(static_cast<uint64_t>(n_slices));
  const auto size = static_cast<int64_t>(all.size());
  const int64_t per_slice = size / n_slices, n_longer = size % n_slices;
  Values out;
  for (int64_t i = 0, begin = 0; i < n_slices; ++i) {
    const int64_t end = begin + per_slice + (i < n_longer);
    Values row(all.begin() + begin, all.begin() + end);
    if (params[1] && !params[1]->is(Type::none) && i >= n_longer) row.push_back(*params[1]);
    out.push_back(Value::list(std::move(row)));
    begin = end;
  }
  return Value::iterator(std::move(out));
}

Value map_filter(Interp& interp, const Value& value, const Args& args) {
  if (!truthy(value)) return Value::iterator({});
  Values out;
  if (args.positional.empty() && !args.keywords.empty()) {
    const Value *attribute = nullptr, *otherwise = nullptr;
    for (const auto& [name, item] : args.keywords) {
      if (name != "attribute" && name != "default")
        throw PyError("FilterArgumentError", fmt::format("Unexpected keyword argument {}", repr_text(name)));
      (name == "attribute" ? attribute : otherwise) = &item;
    }
    if (attribute == nullptr) throw PyError("FilterArgumentError", "map requires a filter argument");
    const Values path = attribute_path(attribute);
    for (const Value& item : iterate(value, interp.meter)) out.push_back(follow(interp, item, path, otherwise));
    return Value::iterator(std::move(out));
  }
  if (args.positional.empty()) throw PyError("FilterArgumentError", "map requires a filter argument");
  Args rest = args;
  const Value name = rest.positional[0];
  if (!name.is(Type::text)) type_error("the name of a filter must be a string, not {}", type_name(name));
  rest.positional.erase(rest.positional.begin());
  for (const Value& item : iterate(value, interp.meter)) {
    interp.meter.step();
    out.push_back(interp.call_filter(name.str(), item, rest));
  }
  return Value::iterator(std::move(out));
}

Value choose(Interp& interp, const Value& value, const Args& args, bool by_attribute, bool keep) {
  if (!truthy(value)) return Value::iterator({});
  Args rest = args;
  Values path;
  if (by_attribute) {
    if (rest.positional.empty()) throw PyError("FilterArgumentError", "Missing parameter for attribute name");
    path = attribute_path(&rest.positional[0]);
    rest.positional.erase(rest.positional.begin());
  }
  std::string test;
  if (!rest.positional.empty()) {
    if (!rest.positional[0].is(Type::text)) type_error("the name of a test must be a string, not {}", type_name(rest.positional[0]));
    test = rest.positional[0].str();
    rest.positional.erase(rest.positional.begin());
  }
  Values out;
  for (const Value& item : iterate(value, interp.meter)) {
    interp.meter.step();
    const Value subject = follow(interp, item, path);
    if ((test.empty() ? truthy(subject) : interp.call_test(test, subject, rest)) == keep) out.push_back(item);
  }
  return Value::iterator(std::move(out));
}
Value select(Interp& interp, const Value& value, const Args& args) { return choose(interp, value, args, false, true); }
Value reject(Interp& interp, const Value& value, const Args& args) { return choose(interp, value, args, false, false); }
Value selectattr(Interp& interp, const Value& value, const Args& args) { return choose(interp, value, args, true, true); }
Value rejectattr(Interp& interp, const Value& value, const Args& args) { return choose(interp, value, args, true, false); }

constexpr FilterEntry kSequenceFilters[] = {
    {"length", length_filter}, {"count", length_filter}, {"first", first}, {"last", last}, {"list", list}, {"join", join},
    {"reverse", reverse}, {"sort", sort}, {"unique", unique}, {"min", minimum}, {"max", maximum}, {"sum", sum},
    {"items", items}, {"dictsort", dictsort}, {"groupby", groupby}, {"batch", batch}, {"slice", slice_filter},
    {"map", map_filter}, {"select", select}, {"reject", reject}, {"selectattr", selectattr}, {"rejectattr", rejectattr}};

}  // namespace

std::span<const FilterEntry> sequence_filters() { return kSequenceFilters; }

}  // namespace dspark::formats::jinja
