// A folder of its own for one test, removed at the end.
#pragma once

#include <stdlib.h>
#include <catch2/catch.hpp>

#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

struct Scratch {
  std::filesystem::path folder;
  Scratch() {
    std::string name = (std::filesystem::temp_directory_path() / "dspark_test_XXXXXX").string();
    REQUIRE(::mkdtemp(name.data()));
    folder = name;
  }
  ~Scratch() { std::filesystem::remove_all(folder); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  // Writes `bytes` as they are; returns the file's path.
  std::filesystem::path put(std::string_view name, std::string_view bytes) const {
    const auto path = folder / name;
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return path;
  }
};
