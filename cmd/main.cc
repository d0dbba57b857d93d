#include <cstdio>

int main() {
  std::puts("dspark " DSPARK_VERSION);
  return 0;
}
