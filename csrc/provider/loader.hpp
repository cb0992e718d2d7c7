// Finds libfabric at run time. Nothing links against it: without the library everything else works on one host.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "provider/provider.hpp"

struct fi_info;
struct fi_fabric_attr;
struct fid_fabric;

namespace expertwire {

// The only symbols that libfabric exports to us; everything else goes through the objects' own tables of operations.
struct LibfabricCalls {
    int (*getinfo)(std::uint32_t version, const char* node, const char* service, std::uint64_t flags,
                   const struct fi_info* hints, struct fi_info** info) = nullptr;
    void (*freeinfo)(struct fi_info* info) = nullptr;
    struct fi_info* (*dupinfo)(const struct fi_info* info) = nullptr;
    int (*fabric)(struct fi_fabric_attr* attributes, struct fid_fabric** fabric, void* context) = nullptr;
    const char* (*strerror)(int code) = nullptr;
    std::uint32_t (*version)() = nullptr;
};

struct LibraryCandidate {
    std::string path;
    std::uint32_t major = 0, minor = 0;  // 0.0: could not be loaded
    std::string error;                   // why not
};

// A loaded libfabric. It is never unloaded: its providers keep threads, signal handlers and exit handlers.
class LibfabricLibrary {
  public:
    const LibfabricCalls& calls() const { return calls_; }
    const std::string& path() const { return path_; }
    std::uint32_t major() const { return major_; }
    std::uint32_t minor() const { return minor_; }
    const std::vector<LibraryCandidate>& tried() const { return tried_; }

  private:
    friend std::shared_ptr<const LibfabricLibrary> load_libfabric(const std::vector<std::string>&, ControlResult&);
    LibfabricCalls calls_;
    std::string path_;
    std::uint32_t major_ = 0, minor_ = 0;
    std::vector<LibraryCandidate> tried_;
};

// Loads the best version among `candidates` (paths, or a bare "libfabric.so.1" for the system's search path; found by
// fabric/discover.py). One library per process: a second call with the same candidates gives the same one. On failure
// null, and `result` says which paths were tried and why each failed (`refused`).
std::shared_ptr<const LibfabricLibrary> load_libfabric(const std::vector<std::string>& candidates,
                                                       ControlResult& result);

}  // namespace expertwire
