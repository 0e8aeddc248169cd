//! NVIDIA's run-time compiler, taken from its Python package: no CUDA toolkit needed.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context as _, Result, bail, ensure};
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

/// Newer compilers make PTX that drivers in the field refuse.
pub(crate) const PACKAGE: &str = "nvidia-cuda-nvrtc-cu12==12.1.105";

type Program = *mut c_void;
type Strings = *const *const c_char;

/// The compiler, loaded.
pub(crate) struct Nvrtc {
    compiler: Library,
    /// The compiler looks this one up by name, so it must be loaded first and stay.
    _builtins: Library,
}

impl Nvrtc {
    /// Loads the compiler from `cache`, where it is downloaded to and unpacked the first time.
    pub(crate) fn obtain(cache: &Path) -> Result<Self> {
        static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
        let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let unpacked = cache.join("nvidia/cuda_nvrtc/lib");
        if !unpacked.join("libnvrtc.so.12").exists() {
            download(cache)?;
        }
        let load = |name: &str, visible| {
            let path = unpacked.join(name);
            // SAFETY: NVIDIA's libraries have no initialisers that depend on this process's state.
            unsafe { Library::open(Some(&path), RTLD_NOW | visible) }
                .with_context(|| format!("load {}", path.display()))
        };
        let builtins = load("libnvrtc-builtins.so.12.1", RTLD_GLOBAL)?;
        let compiler = load("libnvrtc.so.12", RTLD_LOCAL)?;
        Ok(Self {
            compiler,
            _builtins: builtins,
        })
    }

    /// Compiles one source with its headers, each a name and a text: to PTX for a virtual
    /// architecture, else to machine code.
    pub(crate) fn compile(
        &self,
        source: &(&str, String),
        headers: &[(&str, String)],
        options: &[String],
    ) -> Result<Vec<u8>> {
        let (name, text) = (CString::new(source.0)?, CString::new(source.1.as_str())?);
        let header_names = strings(headers.iter().map(|(name, _)| *name))?;
        let header_texts = strings(headers.iter().map(|(_, text)| text.as_str()))?;
        let is_virtual = options.iter().any(|option| option.contains("=compute_"));
        let options = strings(options.iter().map(String::as_str))?;
        let mut program: Program = std::ptr::null_mut();
        // SAFETY: the documented signature; all strings outlive the call.
        let code = unsafe {
            self.function::<unsafe extern "C" fn(
                *mut Program,
                *const c_char,
                *const c_char,
                c_int,
                Strings,
                Strings,
            ) -> c_int>("nvrtcCreateProgram")?(
                &raw mut program,
                text.as_ptr(),
                name.as_ptr(),
                c_int::try_from(headers.len())?,
                pointers(&header_texts).as_ptr(),
                pointers(&header_names).as_ptr(),
            )
        };
        ensure!(code == 0, "nvrtcCreateProgram answered {code}");
        let result = self.compile_program(program, &options, is_virtual);
        // SAFETY: the documented signature; the program is not used again.
        unsafe {
            self.function::<unsafe extern "C" fn(*mut Program) -> c_int>("nvrtcDestroyProgram")?(
                &raw mut program,
            );
        }
        result
    }

    fn compile_program(
        &self,
        program: Program,
        options: &[CString],
        is_virtual: bool,
    ) -> Result<Vec<u8>> {
        // SAFETY: the documented signature; the program is alive and the strings outlive the call.
        let code = unsafe {
            self.function::<unsafe extern "C" fn(Program, c_int, Strings) -> c_int>(
                "nvrtcCompileProgram",
            )?(
                program,
                c_int::try_from(options.len())?,
                pointers(options).as_ptr(),
            )
        };
        if code != 0 {
            let log = self.part(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
            let log = String::from_utf8_lossy(&log);
            bail!("nvrtcCompileProgram answered {code}:\n{log}");
        }
        if !is_virtual {
            return self.part(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN");
        }
        let mut text = self.part(program, "nvrtcGetPTXSize", "nvrtcGetPTX")?;
        // Its size counts the zero at the end.
        text.pop();
        Ok(text)
    }

    /// A part of the program, by the functions that tell its size and its content.
    fn part(&self, program: Program, size: &str, content: &str) -> Result<Vec<u8>> {
        let mut bytes = 0_usize;
        // SAFETY: the documented signature; the program is alive.
        let code = unsafe {
            self.function::<unsafe extern "C" fn(Program, *mut usize) -> c_int>(size)?(
                program,
                &raw mut bytes,
            )
        };
        ensure!(code == 0, "{size} answered {code}");
        let mut buffer = vec![0_u8; bytes];
        // SAFETY: the documented signature; the buffer has the size that was asked for.
        let code = unsafe {
            self.function::<unsafe extern "C" fn(Program, *mut c_char) -> c_int>(content)?(
                program,
                buffer.as_mut_ptr().cast(),
            )
        };
        ensure!(code == 0, "{content} answered {code}");
        Ok(buffer)
    }

    /// # Safety
    /// `F` must be the function's documented signature.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F> {
        // SAFETY: the caller's promise; the library lives as long as `self`.
        let found = unsafe { self.compiler.get::<F>(name.as_bytes()) };
        Ok(*found.with_context(|| format!("NVRTC lacks {name}"))?)
    }
}

fn strings<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<CString>> {
    texts.map(|text| Ok(CString::new(text)?)).collect()
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).collect()
}

/// Fetches the package with pip and unpacks it into `cache`.
fn download(cache: &Path) -> Result<()> {
    fs::create_dir_all(cache).with_context(|| format!("create {}", cache.display()))?;
    let pip = [
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--retries=1",
    ];
    python(
        Command::new("python3")
            .args(pip)
            .arg("--dest")
            .arg(cache)
            .arg(PACKAGE),
    )?;
    let wheel = fs::read_dir(cache)?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
        .context("pip left no wheel")?;
    python(
        Command::new("python3")
            .args(["-m", "zipfile", "-e"])
            .arg(&wheel)
            .arg(cache),
    )?;
    fs::remove_file(&wheel).with_context(|| format!("remove {}", wheel.display()))
}

fn python(command: &mut Command) -> Result<()> {
    let output = command.output().context("run python3")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "{command:?} failed: {}",
        said.trim()
    );
    Ok(())
}
