#include "provider/loader.hpp"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <rdma/fabric.h>
#include <signal.h>
#include <stdlib.h>

#include <array>
#include <mutex>
#include <optional>

namespace expertwire {
namespace {

// libfabric 1.17 runs a psm2/ipath constructor that replaces handlers, so that Ctrl-C becomes exit(1). This variable,
// set before loading, keeps the backtrace handlers out; the handlers are put back as well, since other providers set
// theirs.
class QuietLoading {
  public:
    QuietLoading() {
        if (const char* old = getenv(kVariable)) old_value_ = old;
        setenv(kVariable, "1", 1);
        for (int number = 1; number < NSIG; ++number) {
            known_[number] = sigaction(number, nullptr, &handlers_[number]) == 0;
        }
    }
    ~QuietLoading() {
        for (int number = 1; number < NSIG; ++number) {
            struct sigaction now{};
            if (!known_[number] || sigaction(number, nullptr, &now) != 0) continue;
            if (!same(now, handlers_[number])) sigaction(number, &handlers_[number], nullptr);
        }
        if (old_value_) {
            setenv(kVariable, old_value_->c_str(), 1);
        } else {
            unsetenv(kVariable);
        }
    }
    QuietLoading(const QuietLoading&) = delete;
    QuietLoading& operator=(const QuietLoading&) = delete;

  private:
    static constexpr const char* kVariable = "IPATH_NO_BACKTRACE";
    static bool same(const struct sigaction& a, const struct sigaction& b) {
        if ((a.sa_flags & SA_SIGINFO) != (b.sa_flags & SA_SIGINFO)) return false;
        return (a.sa_flags & SA_SIGINFO) ? a.sa_sigaction == b.sa_sigaction : a.sa_handler == b.sa_handler;
    }
    std::optional<std::string> old_value_;
    std::array<struct sigaction, NSIG> handlers_{};
    std::array<bool, NSIG> known_{};
};

struct Loaded {
    void* handle = nullptr;
    LibfabricCalls calls;
    std::string path;
};

template <class Function>
bool find(void* handle, const char* name, Function& function, std::string& error) {
    // dlsym gives each symbol's default version: all of one layout, which begins like that of our headers. An older
    // version (dlvsym) would copy shorter structs, while fi_domain() and fi_endpoint() read the full ones.
    function = reinterpret_cast<Function>(dlsym(handle, name));
    if (function == nullptr && error.empty()) error = std::string("has no symbol ") + name;
    return function != nullptr;
}

std::string file_of(void* handle, const std::string& fallback) {
    struct link_map* map = nullptr;
    if (dlinfo(handle, RTLD_DI_LINKMAP, &map) != 0 || map == nullptr || map->l_name[0] == '\0') return fallback;
    std::array<char, PATH_MAX> real{};
    return realpath(map->l_name, real.data()) != nullptr ? std::string(real.data()) : std::string(map->l_name);
}

// RTLD_LOCAL, so that two candidates (or one that MPI has loaded) do not resolve into each other.
std::optional<Loaded> try_load(const std::string& path, std::string& error) {
    Loaded loaded;
    loaded.handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (loaded.handle == nullptr) {
        const char* reason = dlerror();
        error = reason != nullptr ? reason : "dlopen failed";
        return std::nullopt;
    }
    LibfabricCalls& calls = loaded.calls;
    bool complete = find(loaded.handle, "fi_getinfo", calls.getinfo, error);
    complete &= find(loaded.handle, "fi_freeinfo", calls.freeinfo, error);
    complete &= find(loaded.handle, "fi_dupinfo", calls.dupinfo, error);
    complete &= find(loaded.handle, "fi_fabric", calls.fabric, error);
    complete &= find(loaded.handle, "fi_strerror", calls.strerror, error);
    complete &= find(loaded.handle, "fi_version", calls.version, error);
    if (!complete) {
        dlclose(loaded.handle);
        return std::nullopt;
    }
    loaded.path = file_of(loaded.handle, path);
    return loaded;
}

std::string summary(const std::vector<LibraryCandidate>& tried) {
    std::string text;
    for (const LibraryCandidate& candidate : tried) {
        text += (text.empty() ? "" : "; ") + candidate.path + ": " +
                (candidate.error.empty() ? std::to_string(candidate.major) + "." + std::to_string(candidate.minor)
                                         : candidate.error);
    }
    return text;
}

// One per process: libfabric keeps threads and exit handlers, so what was loaded stays, and so does the choice. It is
// never destroyed, because provider objects may outlive static destructors.
struct Chosen {
    std::mutex mutex;
    std::vector<std::string> candidates;
    std::shared_ptr<const LibfabricLibrary> library;
};
Chosen& chosen() {
    static Chosen* const instance = new Chosen;
    return *instance;
}

}  // namespace

std::shared_ptr<const LibfabricLibrary> load_libfabric(const std::vector<std::string>& candidates,
                                                       ControlResult& result) {
    constexpr std::uint32_t kMajorNeeded = 1, kMinorNeeded = 17;
    const std::vector<std::string> paths = candidates.empty() ? std::vector<std::string>{"libfabric.so.1"} : candidates;
    const std::lock_guard lock(chosen().mutex);
    result = {};
    if (chosen().library && chosen().candidates == paths) return chosen().library;

    auto library = std::make_shared<LibfabricLibrary>();
    const QuietLoading quiet;
    for (const std::string& path : paths) {
        LibraryCandidate candidate;
        candidate.path = path;
        if (std::optional<Loaded> loaded = try_load(path, candidate.error)) {
            const std::uint32_t version = loaded->calls.version();
            candidate.major = version >> 16;
            candidate.minor = version & 0xffff;
            candidate.path = loaded->path;
            const auto rank = std::pair(candidate.major, candidate.minor);
            if (rank < std::pair(kMajorNeeded, kMinorNeeded)) {
                candidate.error = "version " + std::to_string(candidate.major) + "." + std::to_string(candidate.minor) +
                                  " is older than 1.17";
            } else if (rank > std::pair(library->major_, library->minor_)) {
                library->calls_ = loaded->calls;
                library->path_ = loaded->path;
                library->major_ = candidate.major;
                library->minor_ = candidate.minor;
            }
        }
        library->tried_.push_back(std::move(candidate));
    }
    if (library->path_.empty()) {
        result = {Status::refused, 0,
                  "no usable libfabric.so.1 (1.17 or newer) was found: " + summary(library->tried_) +
                      ". Install the system's (apt install libfabric1), or `pip install mpich`, or set LIBFABRIC_HOME"};
        return nullptr;
    }
    // Providers are initialised by the first query, and some set signal handlers then: have it happen in here.
    fi_info* ignored = nullptr;
    if (library->calls_.getinfo(FI_VERSION(1, 17), nullptr, nullptr, FI_PROV_ATTR_ONLY, nullptr, &ignored) == 0) {
        library->calls_.freeinfo(ignored);
    }
    chosen().candidates = paths;
    chosen().library = library;
    return library;
}

}  // namespace expertwire
